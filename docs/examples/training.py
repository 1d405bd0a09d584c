"""The training loop that the examples share: progress, held-out evaluation, stopping and resuming.

A run lives in a folder that holds one checkpoint, `step-000400/`: the model as `save_pretrained`
writes it and, in `training.pt`, everything else that the next step depends on. A new checkpoint is
written beside the old one under a temporary name, moved into place whole, and only then is the old
one removed: whatever stops the program, one whole checkpoint is there.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import io
import math
import os
import pickle
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from brickwork.assemblies.assembly import Assembly
from brickwork.blocks import decay_parameter_groups

# What a resumed run may change: nothing that its losses depend on.
FREE = {"out", "resume", "minutes", "data"}
MAY_BE_ZERO = {"seed", "warmup", "weight_decay"}
STATE = {
    "arguments", "data_sha256", "optimizer", "generator", "global_generator", "losses", "held_out",
}  # fmt: skip


@dataclasses.dataclass
class Run:
    """What a run has done: every step's training loss, and what held-out evaluations gave."""

    steps: int
    losses: list[float] = dataclasses.field(default_factory=list)
    held_out: list[tuple[int, float]] = dataclasses.field(default_factory=list)

    @property
    def step(self) -> int:
        return len(self.losses)

    @property
    def finished(self) -> bool:
        return self.step >= self.steps


def argument_parser(description: str, **defaults: Any) -> argparse.ArgumentParser:
    """A parser with the options that all training scripts have; `defaults` give their values."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, help="file to train on")
    add("--out", type=Path, help="folder of the run: its checkpoint")
    add("--resume", action="store_true", help="continue the run in --out exactly where it stopped")
    add("--minutes", type=float, help="stop after so long, with a checkpoint to resume from")
    add("--steps", type=int, help="steps of the optimiser")
    add("--batch", type=int, help="rows of a batch")
    add("--length", type=int, help="tokens of a row")
    add("--lr", type=float, help="highest learning rate, reached after the warm-up")
    add("--warmup", type=int, default=50, help="steps over which the learning rate rises")
    add("--weight-decay", type=float, default=0.1, help="AdamW's, on matrices only")
    add("--clip", type=float, default=1.0, help="largest norm of the gradient")
    add("--eval-every", type=int, help="steps between held-out evaluations, each with a checkpoint")
    add("--seed", type=int, default=0, help="seed of the weights and of the batches")
    parser.set_defaults(**defaults)
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, checked; on `--resume` those of the run that is resumed."""
    args = parser.parse_args(argv)
    if args.resume:
        checkpoint = latest_checkpoint(args.out)
        if checkpoint is None:
            parser.error(f"--resume: there is no checkpoint in {args.out}")
        before = load_state(checkpoint)["arguments"]
        parser.set_defaults(**{k: v for k, v in before.items() if k not in FREE - {"data"}})
        args = parser.parse_args(argv)
        changed = [k for k, v in before.items() if k not in FREE and getattr(args, k) != v]
        for name in changed:
            parser.error(
                f"--{name.replace('_', '-')} was {before[name]} when the run in {args.out} began "
                f"and cannot become {getattr(args, name)}; a resumed run keeps its settings"
            )
    elif latest_checkpoint(args.out) is not None:
        parser.error(
            f"--out: {args.out} holds a run already; continue it with --resume, "
            f"or name or empty another folder"
        )
    for name, value in vars(args).items():
        if type(value) in (int, float) and value <= 0 and name not in MAY_BE_ZERO:
            parser.error(f"--{name.replace('_', '-')} must be above 0, got {value}")
    if not args.data.is_file():
        parser.error(f"--data: {args.data} is not a file")
    return args


def fit(
    model: Assembly,
    args: argparse.Namespace,
    *,
    batch_loss: Callable[[torch.Generator], Tensor],
    evaluate: Callable[[], float],
) -> Run:
    """Train `model` for `args.steps` steps, or until Ctrl-C or the time limit stops it.

    Everything random in a step comes from the generator that `batch_loss` is given, or from
    torch's global one; both are part of the checkpoint, so a resumed run repeats, on the same
    machine, every bit of the run that was not stopped.

    Arguments:
        batch_loss: draws a batch and returns its loss ().
        evaluate: returns the held-out loss; called without gradients, in eval mode.
    """
    generator = torch.Generator().manual_seed(args.seed)
    groups = decay_parameter_groups(model, weight_decay=args.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))
    run = Run(args.steps)
    data_sha256 = hashlib.sha256(args.data.read_bytes()).hexdigest()
    if args.resume:
        _restore(model, optimizer, generator, run, args.out, data_sha256)
    deadline = math.inf if args.minutes is None else time.monotonic() + 60 * args.minutes

    def evaluate_and_note(bar: tqdm) -> None:
        model.eval()
        with torch.no_grad():
            run.held_out.append((run.step, evaluate()))
        model.train()
        bar.set_postfix_str(f"held-out {run.held_out[-1][1]:.3f} bits")

    def save() -> None:
        settings = {k: v for k, v in vars(args).items() if k not in FREE}
        state = {
            "arguments": {**settings, "data": str(args.data.resolve())},
            "data_sha256": data_sha256,
            "optimizer": optimizer.state_dict(),
            "generator": generator.get_state(),
            "global_generator": torch.get_rng_state(),
            "losses": run.losses,
            "held_out": run.held_out,
        }
        save_checkpoint(args.out, run.step, model, state)

    tokens = args.batch * args.length
    bar = tqdm(
        total=args.steps * tokens,
        initial=run.step * tokens,
        desc=type(model).__name__,
        unit=" tokens",
        unit_scale=True,
        dynamic_ncols=True,
    )
    with bar, StopRequest() as stop:
        if not run.held_out:
            evaluate_and_note(bar)
        model.train()
        while not run.finished and not stop.requested and time.monotonic() < deadline:
            rate = learning_rate(run.step, args)
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss = batch_loss(generator)
            if not loss.isfinite():
                raise ValueError(f"the loss of step {run.step} is {loss.item()}: try a lower --lr")
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            optimizer.zero_grad()
            run.losses.append(loss.item())
            bar.set_description(f"{type(model).__name__} loss {run.losses[-1]:.3f}", refresh=False)
            bar.update(tokens)
            if run.step % args.eval_every == 0 or run.finished:
                evaluate_and_note(bar)
                with stop.held_back():
                    try:
                        save()
                    except OSError as error:
                        tqdm.write(f"Going on without a checkpoint of step {run.step}: {error}")
        with stop.held_back():
            save()
    model.eval()
    if not run.finished:
        print(f"Stopped at step {run.step} of {run.steps}. --resume continues from here.")
    if stop.requested:
        raise SystemExit(130)
    return run


def run_script(main: Callable[[], object]) -> None:
    """Call `main`; what the user got wrong ends the program with its message, without a trace."""
    try:
        main()
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def gain(bits: Tensor, baseline: Tensor) -> tuple[float, float]:
    """The mean of how many bits fewer the model needs, and its standard error."""
    fewer = baseline - bits
    return fewer.mean().item(), fewer.std().item() / math.sqrt(len(fewer))


def comparison(bits: Tensor, baseline: Tensor) -> str:
    """The two means and the gain in words."""
    fewer, error = gain(bits, baseline)
    return (
        f"{bits.mean():.3f}, {fewer:.3f} ± {error:.3f} fewer than the unigram baseline's "
        f"{baseline.mean():.3f}"
    )


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up to `args.lr`, then a cosine down to a tenth of it."""
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    done = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.lr * (0.55 + 0.45 * math.cos(math.pi * done))


class StopRequest:
    """Ctrl-C as a request: the loop ends its step and saves. A second Ctrl-C quits at once.

    While `held_back`, which is when a checkpoint is written, it only asks.
    """

    def __init__(self) -> None:
        self.requested = False
        self._held_back = False

    def __enter__(self) -> StopRequest:
        self._before = signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        self._held_back = True
        try:
            yield
        finally:
            self._held_back = False

    def _on_interrupt(self, *_: object) -> None:
        if self.requested and not self._held_back:
            raise KeyboardInterrupt
        if not self.requested:
            tqdm.write("Stopping after this step, with a checkpoint. Ctrl-C again quits at once.")
        self.requested = True


def save_checkpoint(folder: Path, step: int, model: Assembly, state: dict[str, Any]) -> None:
    """Write `folder`/step-..., and remove what it replaces once it is whole and in place.

    Raises:
        OSError: it could not be written; the checkpoint that stood there still does.
    """
    final = folder / f"step-{step:06d}"
    if final.exists():
        return
    partial = folder / f".{final.name}.partial"
    _remove(partial)
    partial.mkdir(parents=True)
    try:
        model.save_pretrained(partial)
        with open(partial / "training.pt", "wb") as file:
            buffer = io.BytesIO()
            torch.save(state, buffer)
            file.write(buffer.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        partial.rename(final)
    except BaseException:
        _remove(partial)
        raise
    for other in [*folder.glob("step-*"), *folder.glob(".step-*.partial")]:
        if other != final:
            _remove(other)


def latest_checkpoint(folder: Path) -> Path | None:
    """The folder of the last step that was saved in a run's folder."""
    steps = {int(path.name[5:]): path for path in folder.glob("step-*") if path.name[5:].isdigit()}
    return steps[max(steps)] if steps else None


def load_state(checkpoint: Path) -> dict[str, Any]:
    """What `training.pt` holds; ValueError if it is damaged."""
    try:
        state = torch.load(checkpoint / "training.pt", weights_only=True)
        if set(state) != STATE:
            raise ValueError(f"it holds {sorted(state)}, not {sorted(STATE)}")
        return state
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise ValueError(f"the checkpoint {checkpoint} is damaged: training.pt: {error}") from error


def _restore(
    model: Assembly,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
    run: Run,
    folder: Path,
    data_sha256: str,
) -> None:
    checkpoint = latest_checkpoint(folder)
    assert checkpoint is not None
    state = load_state(checkpoint)
    if state["data_sha256"] != data_sha256:
        raise ValueError(f"--data is not the file that the run in {folder} began with, or changed")
    try:
        model.load_state_dict(type(model).from_pretrained(checkpoint).state_dict())
        optimizer.load_state_dict(state["optimizer"])
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"the checkpoint {checkpoint} is damaged: {error}") from error
    generator.set_state(state["generator"])
    torch.set_rng_state(state["global_generator"])
    run.losses, run.held_out = state["losses"], state["held_out"]


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
