"""What stands in the place of horovod.tensorflow.keras: hvd_quant.keras, under this name too."""

import sys

import hvd_quant.keras  # noqa: F401

for _name, _module in list(sys.modules.items()):
    if _name.startswith("hvd_quant.keras"):
        sys.modules[_name.replace("hvd_quant.keras", __name__, 1)] = _module
