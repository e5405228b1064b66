"""The choices of all groups, for programs of Hydra's: `@hydra.main(config_path="pkg://lab.conf")`.

Hydra imports this package before it reads its files, whose first one names the schema.
"""

import lab.settings.composition  # noqa: F401  # stores the schema under the name of `settings`
