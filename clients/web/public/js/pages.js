/** The pages that this server has. */

import { address } from "./server.js";

/** Shows the links to other pages that are not turned off. */
export function showLinks() {
  for (const link of document.querySelectorAll("a[data-page]")) {
    if (!(link instanceof HTMLAnchorElement)) continue;
    fetch(address(link.getAttribute("href") ?? ""), { method: "HEAD" }).then(
      (response) => {
        link.hidden = !response.ok;
      },
      () => {},
    );
  }
}
