"""The demo's figures, as SVG that takes its colours from the page it stands in."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from training import Run

# Stand-ins for the page's CSS colours, which follow its light or dark scheme.
INK, MUTED, MODEL, BASELINE = "#010101", "#020202", "#030303", "#040404"
CSS = {INK: "var(--ink)", MUTED: "var(--line)", MODEL: "var(--model)", BASELINE: "var(--baseline)"}

STYLE: Any = {
    "svg.fonttype": "none",
    "font.size": 10,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.frameon": False,
}


def loss_curves(runs: Sequence[tuple[str, str, Run, float]]) -> str:
    """One panel for each (title, unit, run, baseline): held-out loss over the training steps."""
    with rc_context(STYLE):
        figure = Figure((10, 3), layout="constrained")
        panels = figure.subplots(1, len(runs))
        for axes, (title, unit, run, baseline) in zip(panels, runs, strict=True):
            steps, bits = zip(*run.held_out, strict=True)
            axes.plot(steps, bits, color=MODEL, marker="o", markersize=3, label="model")
            axes.axhline(baseline, color=BASELINE, linestyle="--", label="unigram")
            gain = max(baseline - min(bits), 0.05 * baseline)
            axes.set_ylim(baseline - 1.15 * gain, baseline + 0.35 * gain)
            axes.set(title=title, xlabel="training step", ylabel=unit)
        panels[0].legend(loc="lower left")
        return _svg(figure, "held-out loss")


def expert_load(load: Sequence[Sequence[float]], even: float) -> str:
    """One panel for each layer: the share of held-out tokens that each expert gets."""
    with rc_context(STYLE):
        figure = Figure((10, 2.4), layout="constrained")
        panels = figure.subplots(1, len(load), sharey=True, squeeze=False)
        for layer, (axes, shares) in enumerate(zip(panels[0], load, strict=True)):
            axes.bar(range(len(shares)), [100 * share for share in shares], color=MODEL)
            axes.axhline(100 * even, color=BASELINE, linestyle="--")
            axes.set(title=f"layer {layer + 1}", xlabel="expert", xticks=range(len(shares)))
        panels[0, 0].set_ylabel("% of tokens")
        return _svg(figure, "expert load")


def residue_recovery(
    residues: str,
    recovered: Sequence[float],
    probability: Sequence[float],
    frequency: Sequence[float],
) -> str:
    """For each kind of residue how often it is recovered, and what probability it is given where
    it stands, beside its frequency."""
    with rc_context(STYLE):
        figure = Figure((10, 4), layout="constrained")
        upper, lower = figure.subplots(2, 1, sharex=True)
        places = range(len(residues))
        upper.bar(places, [100 * r for r in recovered], 0.6, color=MODEL)
        upper.set(ylabel="% recovered")
        left, right = ([x + shift for x in places] for shift in (-0.2, 0.2))
        lower.bar(left, [100 * p for p in probability], 0.4, color=MODEL, label="model")
        lower.bar(right, [100 * f for f in frequency], 0.4, color=BASELINE, label="unigram")
        lower.set(xticks=places, xticklabels=list(residues), ylabel="% probability")
        lower.set_xlim(-0.7, len(residues) - 0.3)
        lower.legend()
        return _svg(figure, "residue recovery")


def _svg(figure: Figure, label: str) -> str:
    text = io.StringIO()
    # ids of a page's SVGs must differ: those that are used are hashes with this salt
    with rc_context({"svg.hashsalt": label}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = re.sub(r"^.*?(?=<svg)", "", text.getvalue(), flags=re.DOTALL)
    used = set(re.findall(r"#(\w+)[\")]", svg))
    svg = re.sub(r' id="([^"]+)"', lambda found: found[0] if found[1] in used else "", svg)
    for stand_in, colour in CSS.items():
        svg = svg.replace(stand_in, colour)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
