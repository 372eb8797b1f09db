"""Memory doesn't grow with the number of steps."""

import torch

from tests.parallel.memory import allocated
from tests.parallel.torch_workers import wrap

SPECS = {"a": "onebit:exchange=sra", "b": "topk:ratio=0.1"}
PAYLOAD = 256 * 256 // 8  # bytes, the smaller one's


def test_a_thousand_steps_take_no_more_memory_than_three_hundred():
    weights = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.zeros(256, 256)) for name in SPECS})
    optimizer, seen = wrap(weights, SPECS, torch.optim.SGD(weights.parameters(), lr=1e-3)), []
    for step in range(1000):
        optimizer.zero_grad()
        x = float("nan") if step % 50 == 7 else 1.0  # a void step now and then
        (weights["a"].sum() + weights["b"].sum() * x).backward()
        optimizer.synchronize()
        if step % 50 != 7:
            with optimizer.skip_synchronize():
                optimizer.step()
        if step in (300, 999):
            seen.append(allocated())
    assert optimizer.compression_stats()["void_tensors"] == 20 and not optimizer._reducer._flying
    assert seen[1] - seen[0] < 699 * PAYLOAD / 4, seen
