"""What both trainings share: Muon + AdamW, the schedule, two processes, checkpoints, a log."""

import json
import math
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Optimisers:
    """Muon for hidden matrices, AdamW for embeddings, convolutions and vectors.

    Muon's steps are scaled to AdamW's root mean square (Moonlight, arXiv 2502.16982), so one
    learning rate serves both.
    """

    def __init__(self, model: nn.Module, learning_rate: float, weight_decay: float) -> None:
        matrices, others = [], []
        for name, parameter in model.named_parameters():
            is_matrix = parameter.ndim == 2 and "embed_tokens" not in name and min(parameter.shape) >= 16
            (matrices if is_matrix else others).append(parameter)
        muon = Muon(matrices, lr=learning_rate, weight_decay=weight_decay)
        adamw = torch.optim.AdamW(others, lr=learning_rate, weight_decay=0.0, betas=(0.9, 0.95))
        self.optimisers = (muon, adamw)
        self.learning_rate = learning_rate

    def step(self, factor: float) -> None:
        """One update at `factor` × the learning rate."""
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = self.learning_rate * factor
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict]:
        return [optimiser.state_dict() for optimiser in self.optimisers]

    def load_state_dict(self, states: list[dict]) -> None:
        for optimiser, state in zip(self.optimisers, states, strict=True):
            optimiser.load_state_dict(state)


class Muon(torch.optim.Optimizer):
    """Momentum whose update is replaced by the nearest orthogonal matrix (Jordan et al., 2024).

    `torch.optim.Muon` iterates in bfloat16, which takes longer than the whole backward pass on a
    processor without bfloat16 instructions. This one iterates in float32, on all matrices of a
    shape at once.
    """

    def __init__(self, parameters, lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                by_shape.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in by_shape.items():
                updates = orthogonalised(
                    torch.stack([self._momentum(p, group["momentum"]) for p in parameters])
                )
                scale = 0.2 * math.sqrt(max(shape))  # root mean square 0.2, as AdamW's updates have
                for parameter, update in zip(parameters, updates, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(update, alpha=-group["lr"] * scale)

    def _momentum(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        """Nesterov momentum of the gradient."""
        state = self.state[parameter]
        average = state.setdefault("average", torch.zeros_like(parameter))
        average.lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(average, momentum)


def orthogonalised(matrices: Tensor, num_iterations: int = 5) -> Tensor:
    """Newton-Schulz iteration towards U Vᵀ of each matrix's singular value decomposition.

    matrices: (N, rows, columns) → the same shape, singular values near 1. The quintic's
    coefficients are Jordan's: steep at zero, not convergent, good enough within five iterations.
    """
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = 3.4445, -4.7750, 2.0315
    for _ in range(num_iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


def schedule(step: int, num_steps: int, warmup_steps: int, flat_share: float) -> float:
    """Warm-up, flat to `flat_share`, then linearly to zero (trapezoidal; arXiv 2405.18392)."""
    warmup = min(1.0, (step + 1) / warmup_steps)
    decay = (num_steps - step) / (num_steps * (1 - flat_share))
    return min(warmup, decay, 1.0)


class Processes:
    """The processes `torchrun` started (or this one alone), with gradients averaged over them.

    A model this small is faster on two processes of one thread than on two threads of one process.
    `DistributedDataParallel` would do as well; one flat all-reduce a step is shorter and needs no
    wrapper around the model.
    """

    def __init__(self) -> None:
        self.count = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        torch.set_num_threads(1 if self.count > 1 else max(1, os.cpu_count() or 1))
        if self.count > 1:
            dist.init_process_group("gloo")

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, batch: Tensor) -> Tensor:
        """The rows of a batch that are for the own process."""
        return batch.chunk(self.count)[self.rank]

    def average_gradients(self, model: nn.Module) -> float:
        """Average the gradients over the processes, clip them, return their norm."""
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        if self.count > 1:
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat)
            flat /= self.count
            for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(mean.view_as(gradient))
        return float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))

    def wait(self) -> None:
        """Until every process has come here."""
        if self.count > 1:
            dist.barrier()

    def close(self) -> None:
        self.wait()
        if self.count > 1:
            dist.destroy_process_group()


class Log:
    """Losses, averaged over `every` steps, printed and kept as JSON lines."""

    def __init__(self, path: Path, every: int, is_first: bool, start_step: int = 0) -> None:
        self.path, self.every, self.is_first = path, every, is_first
        self.sums: dict[str, float] = {}
        self.counts: dict[str, int] = {}
        self.started, self.start_step = time.monotonic(), start_step
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            if math.isfinite(value):
                self.sums[name] = self.sums.get(name, 0.0) + value
                self.counts[name] = self.counts.get(name, 0) + 1
        if (step + 1) % self.every or not self.is_first:
            return
        seconds = time.monotonic() - self.started
        line = {"step": step + 1, "seconds": round(seconds, 1)}
        line |= {name: round(self.sums[name] / self.counts[name], 4) for name in self.sums}
        line["seconds_per_step"] = round(seconds / (step + 1 - self.start_step), 3)
        print(json.dumps(line), flush=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.sums, self.counts = {}, {}


def save_checkpoint(path: Path, **state) -> None:
    """Written beside and renamed, so an interrupted write never destroys the last checkpoint."""
    beside = path.with_suffix(".tmp")
    torch.save(state, beside)
    beside.replace(path)
