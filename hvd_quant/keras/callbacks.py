"""Horovod's callbacks for Keras 3 and tf_keras, and one for what the compressed exchange costs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf
from horovod.tensorflow import allgather_object, allreduce, rank, size
from horovod.tensorflow.mpi_ops import Min

from hvd_quant.exchange.stats import Stats
from hvd_quant.exchange.telemetry import compression_summary, log_compression
from hvd_quant.keras.reducing import reducing, warn_if_not_reduced
from hvd_quant.tensorflow.averaging import average_parameters, statistics
from hvd_quant.tensorflow.functions import broadcast_variables
from hvd_quant.tensorflow.variables import make_variables, plain, variables_of

Callback = tf.keras.callbacks.Callback


class BroadcastGlobalVariablesCallback(Callback):
    """Give all workers the model and the optimizer of one, so that they start as the same.

    That happens before the first batch, or after it if one of the workers has a model that isn't built until then.
    Compression state stays each worker's own, and so do the states of random generators.

    Arguments:
        root_rank: the worker whose values are taken.
        device: device for the exchange.
        local_variables: a variable of the model, or several, that stay as they are.

    Raises:
        ValueError: if one of ``local_variables`` is no variable.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank, self.device, self.broadcast_done = root_rank, device, False
        if local_variables is None or isinstance(plain(local_variables), tf.Variable):
            local_variables = [] if local_variables is None else [local_variables]
        self._local: set[int] = set()
        for variable in local_variables:
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Leave one more variable as it is."""
        if not isinstance(plain(var), tf.Variable):
            raise ValueError(f"local_variables must be variables; it holds {var!r}")
        self._local.add(id(plain(var)))

    def on_train_begin(self, logs: Any = None) -> None:
        warn_if_not_reduced(self.model)
        if not self.broadcast_done:
            if self.model.built:
                make_variables(self.model.optimizer, self.model.trainable_variables)
            built = allreduce(tf.constant(int(self.model.built)), op=Min, name="BroadcastGlobalVariablesCallback")
            if built.numpy():
                self._broadcast()

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self.broadcast_done:
            self._broadcast()

    def _broadcast(self) -> None:
        with tf.device(self.device):
            broadcast_variables([v for v in self.model.weights if id(plain(v)) not in self._local], self.root_rank)
            broadcast_variables(variables_of(self.model.optimizer), self.root_rank)
        averager = getattr(reducing(self.model.optimizer), "_hvd_averager", None)
        if averager is not None:
            averager.restart()
        self.broadcast_done = True


class AverageParametersCallback(Callback):
    """Bring workers together that train apart for some steps, before each validation and at the end of each epoch.

    With a ModelAveragingOptimizer, by its ``average()``; with a distributed optimizer, what a compressor's ``merge`` lets differ is
    averaged, and the model's statistics, such as those of batch normalisation; otherwise all weights of the model. Put it before
    callbacks that save the model or evaluate it.
    """

    _moved = True

    def on_train_begin(self, logs: Any = None) -> None:
        settings = getattr(reducing(self.model.optimizer), "_hvd_settings", None)
        if getattr(settings, "model", self) is None and statistics(self.model):
            warnings.warn(f"{statistics(self.model)[0].name} and other statistics of this model stay each worker's "
                          "own: give ModelAveragingOptimizer(..., model=model) to average them too", stacklevel=2)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._moved = True

    def on_test_begin(self, logs: Any = None) -> None:
        if self._moved:
            optimizer = reducing(self.model.optimizer)
            if hasattr(optimizer, "average"):
                optimizer.average()
            elif optimizer is not None:
                optimizer.average_parameters()
                average_parameters(statistics(self.model), optimizer._hvd_settings.process_set)
            else:
                average_parameters(self.model)
        self._moved = False

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.on_test_begin()


class MetricAverageCallback(Callback):
    """Average metrics over the workers at the end of each epoch.

    Put it before callbacks that use them, such as ReduceLROnPlateau or TensorBoard. All workers must have the same
    metrics.

    Arguments:
        device: device for the exchange.

    Raises:
        ValueError: at the end of an epoch, on all workers, if their metrics differ.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if not logs:
            return
        names = sorted(logs)
        values = [np.asarray(logs[name], np.float64) for name in names]
        # Numbers of other metrics would be averaged with these without an error.
        everywhere = allgather_object(names, name="MetricAverageCallback")
        if any(other != names for other in everywhere):
            raise ValueError("workers can't average different metrics: " + "; ".join(
                f"worker {worker} has {', '.join(other)}" for worker, other in enumerate(everywhere)))
        with tf.device(self.device):
            mean = allreduce(tf.constant(np.concatenate([value.reshape(-1) for value in values]))).numpy()
        for name, value, part in zip(names, values, np.split(mean, np.cumsum([value.size for value in values])[:-1])):
            logs[name] = part.reshape(value.shape) if value.shape else float(part[0])


class LearningRateScheduleCallback(Callback):
    """Set the learning rate to ``initial_lr * multiplier`` between epochs.

    Arguments:
        initial_lr: the learning rate that is multiplied.
        multiplier: a function of the epoch, or a number m for ``m ** (epoch - start_epoch)``.
        start_epoch: the first epoch to act in.
        end_epoch: the first epoch not to act in any more; without it, to the end.
        staircase: set it at the start of an epoch, which is then a whole number; otherwise at every batch, and the
            epoch is ``epoch + batch / steps_per_epoch``.
        momentum_correction: when the learning rate changes, change the velocity that optimizers with momentum keep by
            the same factor, as in https://arxiv.org/abs/1706.02677.
        steps_per_epoch: batches an epoch, where Keras doesn't know.

    Raises:
        ValueError: if ``initial_lr`` is None, and in training if the batches an epoch are not known.
    """

    def __init__(self, initial_lr: float, multiplier: float | Callable[[float], float], start_epoch: int = 0,
                 end_epoch: int | None = None, staircase: bool = True, momentum_correction: bool = True,
                 steps_per_epoch: int | None = None) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("initial_lr is None; give the learning rate that is to be multiplied")
        self.initial_lr, self.start_epoch, self.end_epoch = initial_lr, start_epoch, end_epoch
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        self.staircase, self.momentum_correction, self.steps_per_epoch = staircase, momentum_correction, steps_per_epoch
        self.current_epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ValueError("Keras doesn't know how many batches an epoch has: give steps_per_epoch to "
                                 f"{type(self).__name__}")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.current_epoch = epoch

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.current_epoch < self.start_epoch or self.end_epoch is not None and self.current_epoch >= self.end_epoch:
            return
        if not self.staircase:
            self._set(self.current_epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._set(self.current_epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is not None:
            logs["lr"] = self._learning_rate()

    def _learning_rate(self) -> float:
        return float(tf.convert_to_tensor(self.model.optimizer.learning_rate))

    def _set(self, epoch: float) -> None:
        old, new = self._learning_rate(), self.initial_lr * self.multiplier(epoch)
        self.model.optimizer.learning_rate = new
        # Scaling the velocity once is scaling the momentum for one batch, as Horovod does, where the momentum is a
        # number that was compiled into the training function.
        if self.momentum_correction and old and new != old:
            for velocity in _velocities(self.model.optimizer):
                velocity.assign(velocity * (new / old))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raise the learning rate from ``initial_lr / size()`` to ``initial_lr``, as in https://arxiv.org/abs/1706.02677.

    Arguments:
        initial_lr: the learning rate to arrive at.
        warmup_epochs: epochs until then.
        momentum_correction, steps_per_epoch: as for :class:`LearningRateScheduleCallback`.
        verbose: 1 for a line when it has arrived.
    """

    def __init__(self, initial_lr: float, warmup_epochs: int = 5, momentum_correction: bool = True,
                 steps_per_epoch: int | None = None, verbose: int = 0) -> None:
        def multiplier(epoch: float) -> float:
            epoch += 1 / self.steps_per_epoch  # so that the last batch of an epoch has a round number
            return (epoch * (size() - 1) / warmup_epochs + 1) / size()

        super().__init__(initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        if epoch == self.end_epoch - 1 and self.verbose > 0 and rank() == 0:
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._learning_rate():g}.")


class BestModelCheckpoint(tf.keras.callbacks.ModelCheckpoint):
    """Keras's ModelCheckpoint with ``save_best_only``; set its ``filepath`` before training, where it is known by then.

    Raises:
        ValueError: when training begins without a filepath.
    """

    def __init__(self, monitor: str = "val_loss", verbose: int = 0, save_weights_only: bool = False, mode: str = "auto",
                 save_freq: Any = "epoch") -> None:
        # Keras 3 wants a name with the right ending.
        super().__init__("best.weights.h5" if save_weights_only else "best.keras", monitor=monitor, verbose=verbose,
                         save_best_only=True, save_weights_only=save_weights_only, mode=mode, save_freq=save_freq)
        self.filepath = None

    def on_train_begin(self, logs: Any = None) -> None:
        if self.filepath is None:
            raise ValueError("BestModelCheckpoint has no filepath: set callback.filepath before training")
        super().on_train_begin(logs)


class CompressionStatsCallback(Callback):
    """Put what this worker sent in each epoch into the logs, for progress bars, ``History`` and TensorBoard.

    ``wire_bytes`` is what went out, ``compression_ratio`` how many times more dense fp32 gradients would have been
    (left out where nothing was sent). Put it after a MetricAverageCallback, and before callbacks that use them.

    Arguments:
        verbose: 1 for a line about the whole training when it ends, on worker 0, 2 for a table by how tensors travelled.
        log_dir: a folder for TensorBoard, where worker 0 writes bytes, seconds and what was hidden of each epoch, a step's mean.
    """

    def __init__(self, verbose: int = 0, log_dir: str | None = None) -> None:
        super().__init__()
        self.verbose, self.log_dir, self._writer = verbose, log_dir, None

    def on_train_begin(self, logs: Any = None) -> None:
        self._first = self._last = self._stats()
        if self.log_dir is not None and rank() == 0:
            self._writer = tf.summary.create_file_writer(str(self.log_dir))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        now, last = self._stats(), self._last
        self._last = now
        if logs is not None:
            logs["wire_bytes"] = now["wire_bytes"] - last["wire_bytes"]
            if logs["wire_bytes"]:
                logs["compression_ratio"] = (now["dense_bytes"] - last["dense_bytes"]) / logs["wire_bytes"]
        if self._writer is not None:
            log_compression(now, self._writer, epoch)

    def on_train_end(self, logs: Any = None) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self.verbose > 1 and rank() == 0:
            print(compression_summary(self._stats(), since=self._first))
        elif self.verbose > 0 and rank() == 0:
            now, first = self._stats(), self._first
            steps = now["steps"] - first["steps"]
            sent, dense = ((now[key] - first[key]) / 1e6 for key in ("wire_bytes", "dense_bytes"))
            spent = [now[key] - first[key] for key in ("encode_seconds", "wait_seconds", "decode_seconds")]
            print(f"hvd_quant: worker 0 sent {sent:.6g} MB in {steps} steps, where dense gradients are {dense:.6g} MB; "
                  "it spent {:.1f} s encoding, {:.1f} s waiting and {:.1f} s decoding".format(*spent))

    def _stats(self) -> dict[str, Any]:
        optimizer = reducing(self.model.optimizer)
        return Stats().as_dict() if optimizer is None else optimizer.compression_stats()


def _velocities(optimizer: Any) -> Iterable[Any]:
    """What an optimizer with momentum keeps of past updates, learning rate included."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    if not getattr(optimizer, "momentum", 0):
        return []
    if hasattr(optimizer, "get_slot"):
        return [v for v in optimizer.weights if "/momentum" in v.name]
    velocities = getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", None) or []
    return [v for v in velocities if v is not None]
