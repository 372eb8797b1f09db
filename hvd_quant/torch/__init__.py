"""The PyTorch frontend: everything that horovod.torch has, with compressed gradients.

Write ``import hvd_quant.torch as hvd`` in the place of ``import horovod.torch as hvd`` and pass ``compression=`` to
:func:`DistributedOptimizer`.
"""

import sys as _sys

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError("hvd_quant.torch needs PyTorch: pip install torch") from error

try:
    import horovod.torch as _horovod
    _horovod.init  # noqa: B018  horovod.torch prints and goes on when its library is missing
except (ImportError, AttributeError) as error:
    raise ImportError("hvd_quant.torch needs Horovod built for this PyTorch; this command builds it: "
                      "hvd-quant build-horovod") from error

from horovod.torch import *  # noqa: F403

from hvd_quant import Compression  # noqa: F401
from hvd_quant.exchange.averaging import averaging_bound  # noqa: F401
from hvd_quant.exchange.telemetry import compression_progress, compression_summary, log_compression  # noqa: F401
from hvd_quant.torch import elastic_state as _elastic_state  # noqa: F401 - hvd.elastic.TorchState knows compressed optimizers from here on
from hvd_quant.torch.amp import GradScaler  # noqa: F401
from hvd_quant.torch.averaging import ModelAveragingOptimizer, average_parameters  # noqa: F401
from hvd_quant.torch.ddp import ddp_comm_hook  # noqa: F401
from hvd_quant.torch.optimizer import DistributedOptimizer, join  # noqa: F401

# Scripts also import Horovod's submodules by name: hvd_quant.torch.elastic is horovod.torch.elastic.
for _name, _module in list(_sys.modules.items()):
    if _name.startswith("horovod.torch."):
        _sys.modules.setdefault(_name.replace("horovod.", "hvd_quant.", 1), _module)

__all__ = [name for name in dir(_horovod) if not name.startswith("_")]


def __getattr__(name):
    return getattr(_horovod, name)
