"""Train the three reference models at small size; demo/index.html shows what they learnt."""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import figures
import torch
import train_lc_plm
import train_mini_llada
import train_rish
from corpora import MASK, to_text
from torch import Tensor
from training import gain, latest_checkpoint

from brickwork.assemblies.proteins import ALPHABET, RESIDUES

HERE = Path(__file__).parent
SENTENCE = (
    "CORPORATION, n.  An ingenious device for obtaining individual profit\n"
    "without individual responsibility."
)
PROMPTS = ("NOBLEMAN, n.  ", "REVERENCE, n.  ")
WAYS: dict[str, dict[str, float]] = {
    "the likeliest": {},
    "sampled": {"temperature": 0.8, "top_p": 0.95},
}
STEP = 2


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--out", type=Path, default="demo", help="folder of the page and the runs")
    parser.add_argument("--resume", action="store_true", help="continue a demo that was stopped")
    parser.add_argument("--minutes", type=float, default=4.0, help="limit on all training")
    parser.add_argument("--steps", type=int, help="of each model, instead of its script's default")
    args = parser.parse_args(argv)
    runs = args.out / "demo-runs"
    if not args.resume:
        shutil.rmtree(runs, ignore_errors=True)
    scripts = {"mini_llada": train_mini_llada, "rish": train_rish, "lc_plm": train_lc_plm}
    deadline = time.monotonic() + 60 * args.minutes
    trained = []
    for i, (name, script) in enumerate(scripts.items()):
        print(f"\n{i + 1} of {len(scripts)}: {script.__doc__}", flush=True)
        share = max(0.01, (deadline - time.monotonic()) / 60 / (len(scripts) - i))
        options = ["--out", str(runs / name), "--minutes", str(share)]
        if args.steps is not None:
            options += ["--steps", str(args.steps)]
        if args.resume and latest_checkpoint(runs / name) is not None:
            options += ["--resume"]
        trained.append(script.main(options))
    page = args.out / "index.html"
    draft = page.with_suffix(".tmp")
    draft.write_text(write_page(*trained), encoding="utf-8")
    draft.replace(page)
    print(f"\nOpen {page} in a browser.")


def write_page(
    llada: train_mini_llada.Trained, rish: train_rish.Trained, plm: train_lc_plm.Trained
) -> str:
    all_of_them: dict[str, tuple[str, str, Any]] = {
        "MiniLLaDA": ("masked diffusion", "bits per byte, upper bound", llada),
        "Rish": ("mixture of experts", "bits per byte", rish),
        "LCPLM": ("bidirectional Mamba", "bits per masked residue", plm),
    }
    stopped = [name for name, (_, _, t) in all_of_them.items() if not t.run.finished]
    note = f"<p>The time limit stopped the training of {', '.join(stopped)} early.</p>"
    return Template((HERE / "page.html").read_text(encoding="utf-8")).substitute(
        notes=note if stopped else "",
        results=results_table(all_of_them),
        curves=figures.loss_curves(
            [
                (name, unit, t.run, t.baseline.mean().item())
                for name, (_, unit, t) in all_of_them.items()
            ]
        ),
        **infilling(llada),
        **writing(rish),
        **recovery(plm),
    )


def results_table(all_of_them: dict[str, tuple[str, str, Any]]) -> str:
    rows = [
        "<tr><th>model</th><th>kind</th><th class=number>parameters</th><th class=number>steps</th>"
        "<th>measure on held-out data</th><th class=number>unigram</th><th class=number>model</th>"
        "<th class=number>fewer bits</th></tr>"
    ]
    for name, (kind, unit, t) in all_of_them.items():
        size = sum(p.numel() for p in t.model.parameters())
        fewer, error = gain(t.bits, t.baseline)
        rows.append(
            f"<tr><td>{name}</td><td>{kind}</td><td class=number>{size:,}</td>"
            f"<td class=number>{t.run.step:,}</td><td>{unit}</td>"
            f"<td class=number>{t.baseline.mean():.3f}</td>"
            f"<td class=number><b>{t.bits.mean():.3f}</b></td>"
            f"<td class=number>{fewer:.3f} ± {error:.3f}</td></tr>"
        )
    return f"<table>{''.join(rows)}</table>"


def infilling(llada: train_mini_llada.Trained) -> dict[str, object]:
    """The steps that fill in a sentence from which a quarter of the letters are taken."""
    draws = torch.rand(len(SENTENCE), generator=torch.Generator().manual_seed(1)).tolist()
    start = SENTENCE.index("  ")
    gaps = [i for i, u in enumerate(draws) if u < 0.25 and i > start and SENTENCE[i] != "\n"]
    holed = "".join("_" if i in gaps else c for i, c in enumerate(SENTENCE))
    states = train_mini_llada.infill(llada.model, holed, steps=-(-len(gaps) // STEP))
    rows = []
    for step, (before, after) in enumerate(zip([states[0], *states], states, strict=False)):
        rows.append(f"<tr><td>{step or ''}</td><td>{_marked(after, before != after)}</td></tr>")
    rows.append(f"<tr><td>truth</td><td>{escape(SENTENCE).replace(chr(10), ' ')}</td></tr>")
    final = to_text(states[-1])
    return {
        "infill": f'<table class="steps">{"".join(rows)}</table>',
        "masked": len(gaps),
        "letters": len(SENTENCE),
        "each": STEP,
        "right": sum(final[i] == SENTENCE[i] for i in gaps),
    }


def writing(rish: train_rish.Trained) -> dict[str, object]:
    """Continuations, and the load of the experts on the held-out rows."""
    config = rish.model.config
    written = []
    for prompt in PROMPTS:
        for kind, options in WAYS.items():
            text = train_rish.continue_text(rish.model, prompt, length=160, **options)
            new = escape(text[len(prompt) :].removesuffix("¶"))
            written.append(f'<p class="soft">{kind}</p><pre><b>{escape(prompt)}</b>{new}</pre>')
    load = expert_load(rish)
    even = config.num_experts_per_tok / config.num_experts
    return {
        "continuations": "".join(written),
        "load": figures.expert_load(load.tolist(), even),
        "top_k": config.num_experts_per_tok,
        "experts": config.num_experts,
        "even": f"{100 * even:g}",
    }


@torch.no_grad()
def expert_load(rish: train_rish.Trained) -> Tensor:
    """The share of held-out tokens that goes to each expert: (layers, E)."""
    config = rish.model.config
    layers = rish.model(rish.rows).router_logits
    counts = [
        logits.topk(config.num_experts_per_tok).indices.flatten().bincount(
            minlength=config.num_experts
        )
        for logits in layers
    ]  # fmt: skip
    return torch.stack(counts) / rish.rows.numel()


def recovery(plm: train_lc_plm.Trained) -> dict[str, object]:
    """How many masked residues of each kind come back, and three proteins to look at."""
    truth = torch.cat([r.truth for r in plm.recovered])
    hit = torch.cat([r.guess for r in plm.recovered]) == truth
    kinds = [ALPHABET.index(r) for r in RESIDUES[:20]]
    rates, given, frequencies = (
        [each[truth == kind].mean().nan_to_num().item() for kind in kinds]
        for each in (hit.float(), 2**-plm.bits, 2**-plm.baseline)
    )
    commonest = kinds[max(range(20), key=lambda i: frequencies[i])]
    by_length = sorted(range(len(plm.proteins)), key=lambda i: len(plm.proteins[i].sequence))
    shown = []
    for i in by_length[3:6]:
        protein, found = plm.proteins[i], plm.recovered[i]
        right = found.truth == found.guess
        letters = [
            f'<mark class="hit">{r}</mark>' if ok else r
            for r, ok in zip(protein.sequence, right.tolist(), strict=True)
        ]
        shown.append(
            f"<p>{escape(protein.name)}, {int(right.sum())} of {len(letters)}</p>"
            f"<pre>{''.join(letters)}</pre>"
        )
    fewer, error = gain(plm.bits, plm.baseline)
    return {
        "proteins": len(plm.proteins),
        "times": f"{fewer / error:.1f}",
        "recovered": f"{hit.float().mean():.1%}",
        "commonest": f"{(truth == commonest).float().mean():.1%}",
        "residues": figures.residue_recovery(RESIDUES[:20], rates, given, frequencies),
        "examples": "".join(shown),
    }


def _marked(ids: Tensor, new: Tensor) -> str:
    """The text of `ids` (T,) as HTML, what is `new` marked and what is masked a dot."""
    parts = []
    for token, is_new in zip(ids, new.tolist(), strict=True):
        letter = "·" if token == MASK else escape(to_text(token[None]).replace("\n", " "))
        parts.append(f"<mark>{letter}</mark>" if is_new else letter)
    return "".join(parts)


if __name__ == "__main__":
    main()
