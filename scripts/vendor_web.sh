#!/usr/bin/env bash
# Fills clients/web/public/vendor with the libraries of the web pages, in the versions that clients/web/package.json
# names. Needs npm. To take newer ones: change the numbers there, run this, and commit what has changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../clients/web"

fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
cp package.json package-lock.json "$fresh" 2>/dev/null || cp package.json "$fresh"
(cd "$fresh" && npm install --ignore-scripts --no-audit --no-fund --loglevel=error)
cp "$fresh/package-lock.json" .

vendor=public/vendor
packages=$fresh/node_modules
rm -f $vendor/*.js $vendor/*.txt

# take FILE PACKAGE SOURCE LICENCE: one file without its source map, and its licence.
take() {
  { echo "// $2 $(node -p "require('$packages/$2/package.json').version"), see $1.LICENSE.txt"
    grep -v '^//# sourceMappingURL=' "$packages/$2/$3"; } > "$vendor/$1.js"
  cp "$packages/$2/$4" "$vendor/$1.LICENSE.txt"
}
take marked marked lib/marked.esm.js LICENSE
take purify dompurify dist/purify.es.mjs LICENSE
take highlight @highlightjs/cdn-assets es/highlight.min.js LICENSE
cp "$packages/marked/lib/marked.d.ts" "$vendor/marked.d.ts"
