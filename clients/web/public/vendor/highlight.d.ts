/** What the pages use of highlight.js. */
declare const hljs: {
  getLanguage(name: string): { name?: string } | undefined;
  highlight(code: string, options: { language: string; ignoreIllegals?: boolean }): { value: string };
};
export default hljs;
