"""The TensorFlow frontend: everything that horovod.tensorflow has, with compressed gradients.

Write ``import hvd_quant.tensorflow as hvd`` in the place of ``import horovod.tensorflow as hvd`` and pass ``compression=`` to
:func:`DistributedGradientTape` or :func:`DistributedOptimizer`. With ``model.fit``, use :mod:`hvd_quant.keras`.
"""

import sys as _sys

try:
    import tensorflow as _tensorflow  # noqa: F401
except ImportError as error:
    raise ImportError("hvd_quant.tensorflow needs TensorFlow: pip install tensorflow") from error

try:
    import horovod.tensorflow as _horovod
except ImportError as error:
    raise ImportError("hvd_quant.tensorflow needs Horovod built for this TensorFlow; this command builds it: "
                      "hvd-quant build-horovod") from error

from horovod.tensorflow import *  # noqa: F403

import hvd_quant.tensorflow.elastic as elastic  # noqa: F401 - "from ... import" would find Horovod's, just imported
from hvd_quant import Compression  # noqa: F401
from hvd_quant.exchange.averaging import averaging_bound  # noqa: F401
from hvd_quant.exchange.telemetry import compression_progress, compression_summary, log_compression  # noqa: F401
from hvd_quant.tensorflow.averaging import average_parameters  # noqa: F401
from hvd_quant.tensorflow.functions import broadcast_global_variables, broadcast_variables, join  # noqa: F401
from hvd_quant.tensorflow.guard import install_guard as _install_guard
from hvd_quant.tensorflow.optimizer import DistributedOptimizer, ModelAveragingOptimizer  # noqa: F401
from hvd_quant.tensorflow.sync_batch_norm import SyncBatchNormalization  # noqa: F401
from hvd_quant.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape  # noqa: F401

_install_guard()

# Scripts also import Horovod's submodules by name: hvd_quant.tensorflow.mpi_ops is horovod.tensorflow.mpi_ops.
for _name, _module in list(_sys.modules.items()):
    if _name.startswith("horovod.tensorflow.") and not _name.startswith("horovod.tensorflow.keras"):
        _sys.modules.setdefault(_name.replace("horovod.", "hvd_quant.", 1), _module)

__all__ = [name for name in dir(_horovod) if not name.startswith("_")]


def __getattr__(name):
    return getattr(_horovod, name)
