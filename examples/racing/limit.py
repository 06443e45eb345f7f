"""The limit: what one would write by hand for one process. autograd.grad, clipping, fused AdamW."""

from __future__ import annotations

import torch

from functional_par.tree import unflatten

from .models import angles_of, batch_of, plain_loss, weights_of
from .setting import BETAS, CLIP, EPS, LR, WEIGHT_DECAY, Job
from .worker import Serve


def main(job: Job, serve: Serve) -> None:
    """Options: ``compile`` puts the loss under torch.compile."""
    params = {path: x.requires_grad_() for path, x in weights_of(job.sizes).items()}
    optimizer = torch.optim.AdamW(params.values(), LR, BETAS, EPS, WEIGHT_DECAY, fused=True)
    batch, angles = batch_of(job.sizes), angles_of(job.sizes)
    loss_of = torch.compile(plain_loss) if job.options.get("compile") else plain_loss

    def step() -> float:
        loss = loss_of(unflatten(params), batch, *angles)
        for leaf, grad in zip(params.values(), torch.autograd.grad(loss, list(params.values())), strict=True):
            leaf.grad = grad
        torch.nn.utils.clip_grad_norm_(params.values(), CLIP, foreach=True)
        optimizer.step()
        return loss.item()

    serve(step)
