/** What the pages use of DOMPurify. */
interface Config {
  ALLOWED_TAGS?: string[];
  ALLOWED_ATTR?: string[];
  ALLOWED_URI_REGEXP?: RegExp;
  ALLOW_DATA_ATTR?: boolean;
  ALLOW_ARIA_ATTR?: boolean;
}

declare const DOMPurify: {
  sanitize(html: string, config: Config & { RETURN_DOM_FRAGMENT: true }): DocumentFragment;
};
export default DOMPurify;
