"""docs/configuration.md, made from the options."""

from __future__ import annotations

from streamserve.config.options import flag
from streamserve.config.sections import options
from streamserve.config.sources import ENV_PREFIX, shown_default

_PAGE = """\
# Configuration

Every option of `streamserve serve` can be given in four places. Where several give it, the later one in this
list wins:

1. the default,
2. a YAML file named by `--config FILE` or `STREAMSERVE_CONFIG`, whose keys are the names of the flags
   (`max_num_seqs: 32` or `max-num-seqs: 32`),
3. the environment variable,
4. the flag.

Sizes take the units `K`, `M`, `G` and `T` (powers of 1024); counts take `k` and `m` (thousands, millions).
A switch such as `--enable-prefix-caching` has an opposite, `--no-enable-prefix-caching`; as a variable or in
YAML it is `true` or `false`. Lists are separated by commas; their flags can also be repeated, and YAML has
lists of its own. An empty default means none, or that the value is worked out at start-up.

"""


def documentation() -> str:
    """The Markdown table of every option, as it stands in docs/configuration.md."""
    lines = ["| flag | variable | default | meaning |", "| --- | --- | --- | --- |"]
    for _, item in options():
        meta = item.metadata
        name = item.name.upper() if meta["positional"] else flag(item)
        text = meta["help"]
        if meta["choices"]:
            text += f" One of {', '.join(meta['choices'])}."
        shown = shown_default(item)
        default = f"`{shown}`" if shown else ""
        lines.append(f"| `{name}` | `{ENV_PREFIX}{item.name.upper()}` | {default} | {text} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The whole of docs/configuration.md; `python -m streamserve.config` prints it."""
    return _PAGE + documentation()
