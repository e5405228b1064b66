"""Settings: their schema, composition and checks; and the command line of all commands."""

import lab

# PyPI has a package of that name too, whose files pip writes over ours without a word.
if not hasattr(lab, "_HOME"):
    raise ImportError(
        f"{lab.__file__}: belongs to another package, which has replaced the lab's file; run "
        "pip uninstall lab scaling-lab, then install the lab again"
    )
