"""ms-swift on trees: `--external_plugins .../treewise/integrations/swift/plugin.py --callbacks treewise`.

The path is printed by `python -c "import treewise.integrations as t; print(t.__path__[0] + '/swift/plugin.py')"`.
"""

from typing import Any

from swift.callbacks import callbacks_map

from treewise.integrations.callback import SharePrefixes


class TreewiseCallback(SharePrefixes):
    """The callback, as ms-swift makes one: from the arguments and the trainer."""

    def __init__(self, _args: Any, trainer: Any) -> None:
        super().__init__(trainer)


callbacks_map["treewise"] = TreewiseCallback
