"""The figures of the course: one function each, drawn from the real classes, returning a Figure.

python -m helpers.figures            write images/*.svg
python -m helpers.figures --check    fail where a drawing is not the stored image, write nothing

In a notebook: `figures.rotation()`, then `plt.show()`. A part has one colour in all figures, and
never a colour alone: added parts have a solid outline and a plus, removed ones a dashed outline and
a minus. Diagrams are drawn in inches.
"""

import io
import math
import sys
import textwrap
from pathlib import Path

import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib import style
from matplotlib.colors import to_rgb
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch, Rectangle
from matplotlib.path import Path as Line
from torch import nn

from helpers.attention import GroupedQueryAttention
from helpers.families import describe, diff_families, lookup
from helpers.feed_forward import GELU, FeedForward, SiLU
from helpers.kv_cache import KVCache
from helpers.languages import COUNTS, TEXTS
from helpers.llama2 import LLAMA2_CONFIG_7B
from helpers.llama3 import LLAMA31_CONFIG_8B, LLAMA32_CONFIG_1B, Llama3Model
from helpers.norms import LayerNorm, RMSNorm
from helpers.positions import LearnedPositions, apply_rope, compute_rope_params, permute, rescale
from helpers.skeleton import count_parameters

IMAGES = Path(__file__).parent.parent / "images"

NORM, ATTENTION, FEED_FORWARD, POSITIONS = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
KEPT, INK = "#767676", "#222222"  # unchanged parts; everything that is no part, and all text
COLOURS = {
    "norm": NORM,
    "norm epsilon": NORM,
    "attention": ATTENTION,
    "feed-forward": FEED_FORWARD,
    "positions": POSITIONS,
}
STYLE = [
    "default",
    {
        "figure.dpi": 100,
        "font.family": "DejaVu Sans",
        "font.size": 11,
        "axes.titlesize": 12,
        "axes.labelsize": 11,
        "xtick.labelsize": 11,
        "ytick.labelsize": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": KEPT,
        "xtick.color": INK,
        "ytick.color": INK,
        "svg.fonttype": "path",
        "svg.hashsalt": "From GPT-2 to Llama 3.2",
    },
]


# Boxes and arrows


def sheet(ax, width, height):
    """Make `ax` an empty sheet whose coordinates are inches from its lower left corner."""
    ax.set(xlim=(0, width), ylim=(0, height), aspect="equal")
    ax.axis("off")
    return ax


def canvas(width, height):
    """A white figure that is one sheet."""
    fig = plt.figure(figsize=(width, height))
    return fig, sheet(fig.add_axes([0, 0, 1, 1]), width, height)


def tint(colour, strength):
    """The colour mixed with white: 0 is white, 1 the colour itself."""
    return 1 - strength * (1 - np.array(to_rgb(colour)))


def box(ax, x, y, text, colour, *, width, height=0.4, change=None, row=None):
    """A part's box around (x, y); a box without text is a frame.

    `change` is None, "kept", "added" or "removed"; tests find a box by it and by `row`.
    """
    marked = change in ("added", "removed")
    colour = KEPT if change == "kept" else colour
    filled = 0 if change in ("kept", "removed") else 0.07 if colour == INK else 0.16
    outline = FancyBboxPatch(
        (x - width / 2, y - height / 2),
        width,
        height,
        boxstyle="round,pad=0,rounding_size=0.07",
        facecolor=tint(colour, filled) if text else "none",
        edgecolor=colour,
        linestyle=(0, (4, 2)) if change == "removed" else "-",
        linewidth=1.2 if change == "kept" else 2,
        label=f"{change} {row}",
    )
    ax.add_patch(outline)
    ax.text(x, y, text, ha="center", va="center", linespacing=1.3)
    if marked:
        sign(ax, x - width / 2, y + height / 2, "+" if change == "added" else "-", marked=True)


def sign(ax, x, y, text, marked=False):
    """A sign in a circle: white for a sum or product in the stream, dark to mark a changed part."""
    ink, fill = ("white", INK) if marked else (INK, "white")
    ax.add_patch(Circle((x, y), 0.12, facecolor=fill, edgecolor=INK, linewidth=1.2, zorder=3))
    marker = {"+": "+", "-": "_", "*": "x"}[text]
    ax.plot(x, y, marker, color=ink, markersize=8, markeredgewidth=1.8, zorder=4)


def arrow(ax, *points, colour=INK, linestyle="-", linewidth=1.4):
    """A line through `points` that ends in an arrow head; boxes lie above it."""
    ax.add_patch(
        FancyArrowPatch(
            path=Line(points),
            arrowstyle="-|>",
            mutation_scale=12,
            color=colour,
            linestyle=linestyle,
            linewidth=linewidth,
            zorder=0.5,
        )
    )


# 01: the skeleton, and the blocks of two families


@style.context(STYLE)
def skeleton():
    """What all models share: embed, positions, a stack of blocks, a final norm, a head."""
    fig, ax = canvas(9, 3.1)
    stream = 0.8
    arrow(ax, (0.72, stream), (8.2, stream))
    ax.text(0.4, stream, "token\nids", ha="center", va="center")
    ax.text(8.27, stream, "logits", va="center")
    box(ax, 1.25, stream, "embed", INK, width=0.8)
    box(ax, 2.25, 1.65, "positions", POSITIONS, width=1)
    arrow(ax, (2.25, 1.45), (2.25, stream + 0.12), colour=POSITIONS)
    arrow(ax, (2.25, 1.85), (2.25, 2.4), (3.2, 2.4), colour=POSITIONS, linestyle="--")
    ax.text(2.17, 1.17, "GPT-2: added", ha="right", va="center")
    ax.text(2.1, 2.75, "Llama: they turn\nqueries and keys", ha="center", va="center")
    sign(ax, 2.25, stream, "+")
    box(ax, 4.7, 1.7, "", INK, width=3.2, height=2.6, change="kept")
    ax.text(4.7, 0.2, "block, repeated n_layers times", ha="center", va="center")
    sub_layer(ax, 3.7, stream, "attention", ATTENTION)
    sub_layer(ax, 5.2, stream, "feed-\nforward", FEED_FORWARD)
    box(ax, 6.85, stream, "final\nnorm", NORM, width=0.75, height=0.55)
    box(ax, 7.7, stream, "head", INK, width=0.65)
    for x, shape in ((0.4, "(B, T)"), (2.25, "(B, T, D)"), (8.5, "(B, T, V)")):
        ax.text(x, 0.2, shape, ha="center", va="center")
    return fig


def sub_layer(ax, x, stream, text, colour):
    """A norm and a step that read the stream at x; what they make is added further on."""
    arrow(ax, (x, stream), (x, 1.3))
    box(ax, x, 1.5, "norm", NORM, width=0.75)
    arrow(ax, (x, 1.7), (x, 2.15))
    box(ax, x, 2.4, text, colour, width=1, height=0.5)
    arrow(ax, (x + 0.5, 2.4), (x + 0.75, 2.4), (x + 0.75, stream + 0.12))
    sign(ax, x + 0.75, stream, "+")


@style.context(STYLE)
def blocks(old="GPT-2", new="Llama 2"):
    """Two families side by side, by their names in FAMILIES: what left, what came, what stayed."""
    fig, ax = canvas(9, 7.9)
    changed = {row for row, _, _ in diff_families(old, new)}
    draw_model(ax, 0.2, old, changed, "removed")
    draw_model(ax, 4.7, new, changed, "added")
    return fig


def draw_model(ax, left, name, changed, change):
    """One family from token ids to logits, the rows in `changed` marked as added or removed."""
    family = lookup(name)
    rows = describe(*family)
    stream, middle, wide = left + 0.35, left + 2.05, 4.1

    def part(x, y, row, text, width=wide, height=0.4):
        """A box with one row of the parts table; what is not there has no outline."""
        if rows[row] == "none":
            ax.text(x, y, text, ha="center", va="center")
            return
        state = change if row in changed else "kept"
        colour = COLOURS.get(row, INK)
        box(ax, x, y, text, colour, width=width, height=height, change=state, row=row)

    def step(y, row):
        """Norm, then a step, beside the stream; what they make is added to it below."""
        arrow(ax, (stream, y), (left + 0.65, y))
        part(left + 1.2, y, "norm", rows["norm"], width=1.1)
        arrow(ax, (left + 1.75, y), (left + 2, y))
        part(left + 2.95, y, row, f"{row}:\n{rows[row]}", width=1.9, height=0.6)
        arrow(ax, (left + 2.95, y - 0.2), (left + 2.95, y - 0.55), (stream + 0.12, y - 0.55))
        sign(ax, stream, y - 0.55, "+")

    ax.text(middle, 7.68, name, ha="center", va="center", size=13, weight="bold")
    arrow(ax, (stream, 7), (stream, 1.6))
    part(middle, 7.2, "tokenizer", f"tokenizer: {rows['tokenizer']}")
    box(ax, middle, 6.6, "embedding", INK, width=wide, change="kept", row="embedding")
    if issubclass(family.model_class.parts.positions, LearnedPositions):
        text = f"{rows['positions']} positions,\nadded to the embeddings"
        arrow(ax, (left + 1, 5.9), (stream + 0.12, 5.9))
        sign(ax, stream, 5.9, "+")
    else:
        text = f"{rows['positions']},\nturns queries and keys"
        arrow(ax, (left + 3.6, 5.6), (left + 3.6, 4.72))
    part(left + 2.5, 5.9, "positions", text, width=3, height=0.6)
    part(middle, 3.87, "block", "", height=3)
    ax.text(left + 0.55, 5.12, f"block, n_layers times:\n{rows['block']}", va="center")
    step(4.4, "attention")
    step(3.2, "feed-forward")
    part(middle, 2, "norm", f"final norm: {rows['norm']}")
    part(middle, 1.4, "head", f"head: {rows['head']}")
    for row, x, y in (
        ("biases", left + 0.98, 0.8),
        ("dropout", left + 3.12, 0.8),
        ("context", left + 0.98, 0.25),
        ("norm epsilon", left + 3.12, 0.25),
    ):
        part(x, y, row, f"{row}: {rows[row]}", width=1.96)


# 02: norms


@style.context(STYLE)
def norm_geometry():
    """Where the norms put vectors of two elements, on a circle, and of three, on a sphere."""
    fig, (rms, layer, space) = plt.subplots(1, 3, figsize=(9, 3.4), layout="constrained")
    angle, spread = 2.4 * np.arange(12), 1.9 * np.sqrt((np.arange(12) + 0.5) / 12)  # a spiral
    x = np.stack([0.9 + spread * np.cos(angle), 0.4 + spread * np.sin(angle)], axis=1)
    draw_plane(rms, x, [normed(RMSNorm, x)], "RMSNorm")
    rms.text(-1.1, -1.25, "radius\nsqrt(2)", ha="right", va="top")
    rms.text(*x[11] + [0.15, 0.1], "before", ha="left")
    rms.text(0.45, -1.55, "after", va="top")
    draw_plane(layer, x, [x - x.mean(1, keepdims=True), normed(LayerNorm, x)], "LayerNorm")
    layer.plot([-2, 2], [2, -2], color=KEPT, linewidth=1)
    layer.text(1.75, -2, "mean 0", ha="right", va="center")
    draw_space(space)
    return fig


def normed(norm, x):
    """The norm's result for points (n, D); it computes in float32, so three digits are kept."""
    with torch.no_grad():
        return norm(x.shape[-1])(torch.tensor(x)).numpy().round(3)


def draw_plane(ax, x, steps, title):
    """Points of two elements, and arrows to where the steps of a norm put them."""
    ax.add_patch(Circle((0, 0), 2**0.5, fill=False, edgecolor=KEPT, linestyle="--"))
    start = x
    for end in steps:
        for a, b in zip(start, end, strict=True):
            ax.annotate("", b, a, arrowprops={"arrowstyle": "->", "color": KEPT, "lw": 0.8})
        start = end
    ax.plot(*x.T, "o", color="white", markeredgecolor=INK)
    ax.plot(*end.T, "o", color=NORM, markersize=8)
    ax.set(title=f"{title}, 2 elements", xlabel="element 0", ylabel="element 1", aspect="equal")
    ax.set(xlim=(-2.3, 2.7), ylim=(-2.3, 2.7), xticks=range(-2, 3), yticks=range(-2, 3))


def draw_space(ax):
    """Vectors of three elements from all directions after each norm, (1, 1, 1) pointing up."""
    i = np.arange(120)
    height, angle = 1 - (2 * i + 1) / 120, 2.4 * i  # a spiral around a ball
    around = np.sqrt(1 - height**2)
    x = np.stack([around * np.cos(angle), around * np.sin(angle), height], axis=1)
    up, right = np.array([1, 1, 1]) / 3**0.5, np.array([1, -1, 0]) / 2**0.5
    back = np.cross(up, right)
    tilt = 0.35  # radians, the viewer looks down a little
    screen = np.stack([right, math.cos(tilt) * up + math.sin(tilt) * back], axis=1)
    depth = math.cos(tilt) * back - math.sin(tilt) * up
    ax.add_patch(Circle((0, 0), 3**0.5, fill=False, edgecolor=KEPT, linestyle="--"))
    for norm, colour, size in ((RMSNorm, KEPT, 3), (LayerNorm, NORM, 7)):
        y = normed(norm, x)
        for behind in (True, False):
            points = y[(y @ depth > 0) == behind] @ screen
            shade = tint(colour, 0.35 if behind else 1)
            ax.plot(*points.T, "o", color=shade, markersize=size, markeredgewidth=0)
    arrow(ax, (0, 0), np.array([2, 2, 2]) / 3 @ screen * 1.9)
    ax.text(0.15, 2.2, "(1, 1, 1)", va="center")
    ax.set(title="both, 3 elements", xlim=(-2.5, 2.5), ylim=(-2.3, 2.7), aspect="equal")
    ax.set(xlabel="RMSNorm: the whole sphere\nLayerNorm: one circle", xticks=[], yticks=[])
    ax.spines[:].set_visible(False)


# 03: feed-forward


@style.context(STYLE)
def activations():
    """ReLU, GPT-2's GELU and SiLU, and their gradients by autograd."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    left.set(title="function", xlabel="input", ylabel="output", xlim=(-5, 2), ylim=(-0.6, 1.6))
    right.set(title="gradient", xlabel="input", ylabel="change of output per input")
    right.set(xlim=(-5, 5), ylim=(-0.3, 1.4))
    x = torch.linspace(-5, 5, 501, dtype=torch.float64, requires_grad=True)
    for name, function, line, colour, places in (
        ("ReLU", nn.ReLU(), ":", KEPT, [(1, 0.5, 1.2), (2.5, 2.5, 0.75)]),
        ("GELU (tanh)", GELU(), "--", FEED_FORWARD, [(-0.8, -0.8, -0.5), (0.9, -1.6, 1.2)]),
        ("SiLU", SiLU(), "-", FEED_FORWARD, [(-3, -3.6, -0.4), (-3.2, -3.6, 0.25)]),
    ):
        y = function(x)
        (slope,) = torch.autograd.grad(y.sum(), x)
        for ax, curve, place in zip((left, right), (y, slope), places, strict=True):
            draw_curve(ax, x.detach().numpy(), curve.detach().numpy(), line, colour, name, *place)
    return fig


def draw_curve(ax, x, y, line, colour, name, at, *place):
    """A curve, and its name at `place` with a line to the curve's point over x = `at`."""
    ax.plot(x, y, line, color=colour, linewidth=2)
    pointer = {"arrowstyle": "-", "color": INK, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 1}
    point = (at, np.interp(at, x, y))
    ax.annotate(name, point, place, ha="center", va="center", arrowprops=pointer)


@style.context(STYLE)
def gate():
    """The three matrices of SwiGLU at the widths of Llama 2 7B, and what a gate does to a value."""
    fig = plt.figure(figsize=(9, 4.4))
    draw_swiglu(sheet(fig.add_axes([0, 0, 0.5, 1]), 4.5, 4.4))
    ax = fig.add_axes([0.58, 0.13, 0.39, 0.72])
    value, gate = torch.meshgrid(
        torch.linspace(-4, 4, 81, dtype=torch.float64),
        torch.linspace(-6, 6, 121, dtype=torch.float64),
        indexing="ij",
    )
    output, levels = SiLU()(gate) * value, [-16, -8, -4, -2, 2, 4, 8, 16]
    lines = ax.contour(gate, value, output, levels=levels, colors=[FEED_FORWARD])
    places = [((abs(z) * 1.5) ** 0.5, math.copysign((abs(z) / 1.5) ** 0.5, z)) for z in levels]
    for label in ax.clabel(lines, fontsize=11, colors=[INK], manual=places):
        label.set_rotation(0)
    ax.axhline(0, color=FEED_FORWARD)  # the contour of 0 is two exact lines
    ax.axvline(0, color=FEED_FORWARD)
    ax.text(-5, 0, "0", ha="center", va="center", backgroundcolor="white")
    ax.text(-3, 4.15, "closed", ha="center")
    ax.text(3, 4.15, "open", ha="center")
    most = output[gate < 0].abs().max()
    ax.text(-3, 2, f"between\n-{most:.1f} and {most:.1f}", ha="center", va="center")
    ax.set_title("SiLU(gate) * value", pad=26)
    ax.set(xlabel="gate, before SiLU", ylabel="value", yticks=range(-4, 5, 2))
    return fig


def draw_swiglu(ax):
    """x through fc1 and SiLU, and through fc2; their product through fc3."""
    with torch.device("meta"):
        part = FeedForward(LLAMA2_CONFIG_7B)
    width, hidden = f"{part.fc1.in_features:,}", f"{part.fc1.out_features:,}"
    ax.text(2.25, 4.15, f"one token's {width} numbers", ha="center", va="center")
    arrow(ax, (2.25, 4), (2.25, 3.75), (1.15, 3.75), (1.15, 3.5))
    arrow(ax, (2.25, 4), (2.25, 3.75), (3.35, 3.75), (3.35, 3.5))
    box(ax, 1.15, 3.2, f"fc1\n{width} to {hidden}", FEED_FORWARD, width=1.6, height=0.6)
    box(ax, 3.35, 3.2, f"fc2\n{width} to {hidden}", FEED_FORWARD, width=1.6, height=0.6)
    arrow(ax, (1.15, 2.9), (1.15, 2.5))
    ax.text(1.25, 2.7, "gate", va="center")
    box(ax, 1.15, 2.3, "SiLU", FEED_FORWARD, width=0.8)
    arrow(ax, (1.15, 2.1), (1.15, 1.75), (2.13, 1.75))
    arrow(ax, (3.35, 2.9), (3.35, 1.75), (2.37, 1.75))
    ax.text(3.25, 2.7, "value", ha="right", va="center")
    sign(ax, 2.25, 1.75, "*")
    arrow(ax, (2.25, 1.63), (2.25, 1.3))
    box(ax, 2.25, 1, f"fc3\n{hidden} to {width}", FEED_FORWARD, width=1.6, height=0.6)
    arrow(ax, (2.25, 0.7), (2.25, 0.4))
    ax.text(2.25, 0.25, f"{width} numbers", ha="center", va="center")


# 04: positions


def turned(pair, vector, positions, head_dim=64, theta_base=10_000):
    """One pair of a head, turned by RoPE to each position: (positions, 2), in float64."""
    both = [pair, pair + head_dim // 2]
    x = torch.zeros(1, 1, max(positions) + 1, head_dim, dtype=torch.float64)
    x[..., both] = torch.tensor(vector, dtype=torch.float64)
    tables = compute_rope_params(head_dim, theta_base, x.shape[2], dtype=torch.float64)
    return apply_rope(x, *tables)[0, 0, positions][:, both].numpy()


@style.context(STYLE)
def rotation():
    """Pair 4 of a head of 64: one query at eight positions; queries and keys equally far apart."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 2.9), layout="constrained")
    for m, q in enumerate(turned(4, (1, 0), range(8))):
        draw_vector(left, q, f"{m}", "-")
    left.set(title="a query at positions 0 to 7")
    step = math.atan2(*turned(4, (1, 0), [1])[0, ::-1])
    left.text(-0.7, 0.2, f"{step:.2f} radians\nper position", ha="center", va="center")
    draw_pair(right, 3, 0, (1, 0.1))
    draw_pair(right, 7, 4, (-0.7, 0.2))
    right.set(title="a query at m and a key at n = m - 3")
    for ax in (left, right):
        ax.set(xlabel="element 4", ylabel="element 36", aspect="equal")
        ax.set(xlim=(-1.2, 1.4), ylim=(-0.1, 1.25), xticks=(-1, 0, 1), yticks=(0, 1))
    return fig


def draw_vector(ax, v, text, linestyle, gap=0.1):
    """An arrow from the origin, named behind its tip."""
    arrow(ax, (0, 0), v, colour=POSITIONS, linestyle=linestyle, linewidth=2)
    ax.text(*v * (1 + gap / np.hypot(*v)), text, ha="center", va="center")


def draw_pair(ax, m, n, place):
    """A query at m, a key at n, the angle between them, and their score written at `place`."""
    (q,), (k,) = turned(4, (1, 0), [m]), turned(4, (0.72, 0.34), [n])
    draw_vector(ax, q, f"q at {m}", "-")
    draw_vector(ax, k, f"k at {n}", "--", gap=0.2)
    arc = np.linspace(math.atan2(*q[::-1]), math.atan2(*k[::-1]), 20)
    ax.plot(0.5 * np.cos(arc), 0.5 * np.sin(arc), color=INK)
    ax.text(*place, f"q at {m}, k at {n}:\nscore {q @ k:.3f}", ha="center", va="center")


@style.context(STYLE)
def clocks(head_dim=64, theta_base=10_000):
    """How many tokens each pair of a head needs for one turn, and six pairs at three positions."""
    fig, ax = canvas(9, 6)
    left, width = 1.25, 7.6  # of the chart, in inches
    chart = fig.add_axes([left / 9, 0.49, width / 9, 0.46])
    cos, sin = compute_rope_params(head_dim, theta_base, 2, dtype=torch.float64)
    half = head_dim // 2
    wavelength = 2 * math.pi / torch.atan2(sin[1], cos[1])[:half].numpy()  # tokens
    chart.semilogy(range(half), wavelength, "o", color=POSITIONS)
    first = f"pair 0 turns once in {wavelength[0]:.1f} tokens"
    last = f"pair {half - 1} turns once in {wavelength[-1]:,.0f} tokens"
    chart.text(half / 50, wavelength[0], first, va="top")
    chart.text(half - 1 - half / 50, wavelength[-1], last, ha="right", va="bottom")
    context = LLAMA2_CONFIG_7B.context_length
    chart.axhline(context, color=KEPT, linestyle="--")
    chart.text(-0.3, context * 1.2, f"context of Llama 2: {context:,} tokens")
    pairs = range(0, half, max(1, half // 5))  # the six that have a clock
    chart.set(xlabel="pair", ylabel="tokens per turn (log scale)", xticks=pairs)
    chart.set(xlim=(-1, half), ylim=(wavelength[0] / 3, wavelength[-1] * 2))
    chart.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    heights = {1: 1.88, 10: 1.14, 100: 0.4}  # position: inches
    for position, y in heights.items():
        ax.text(0.45, y, f"position\n{position}", ha="center", va="center")
    for pair in pairs:
        x = left + width * (pair + 1) / (half + 1)  # under its tick
        hands = turned(pair, (1, 0), list(heights), head_dim, theta_base)
        for y, hand in zip(heights.values(), hands, strict=True):
            draw_clock(ax, x, y, hand)
    return fig


def draw_clock(ax, x, y, hand):
    """A face around (x, y) with the hand, and a tick on the right where it stood at position 0."""
    ax.add_patch(Circle((x, y), 0.3, fill=False, edgecolor=KEPT))
    ax.plot([x + 0.3, x + 0.37], [y, y], color=INK)
    arrow(ax, (x, y), np.array([x, y]) + 0.28 * hand, colour=POSITIONS, linewidth=2)


@style.context(STYLE)
def score_against_distance():
    """The score of a query and a key of ones, from three places: only the distance counts."""
    fig, (left, right) = plt.subplots(
        1, 2, figsize=(9, 4), layout="constrained", width_ratios=(3, 2.4)
    )
    tables = compute_rope_params(64, context_length=4096, dtype=torch.float64)
    vectors = apply_rope(torch.ones(1, 1, 4096, 64, dtype=torch.float64), *tables)[0, 0]
    for n, step, marker in ((0, 1, "-"), (1000, 20, "o"), (3000, 35, "x")):
        distances = torch.arange(0, 257, step)
        scores = vectors[n + distances] @ vectors[n]
        colour = POSITIONS if marker == "-" else INK
        left.plot(distances, scores, marker, color=colour, markerfacecolor="white", markersize=7)
    left.set(title="q = k = ones, head of 64", ylim=(0, 68))
    left.set(xlabel="distance m - n in tokens", ylabel="score of q at m and k at n")
    left.text(120, 55, "line: n = 0\ncircles: n = 1,000\ncrosses: n = 3,000", va="center")
    scores = vectors[:6] @ vectors[:6].T
    for m in range(6):
        for n in range(m + 1):
            shade = tint(POSITIONS, 0.7 * float(scores[m, n] / scores[0, 0]) ** 4)
            right.add_patch(Rectangle((n - 0.5, m - 0.5), 1, 1, facecolor=shade, edgecolor="white"))
            right.text(n, m, f"{scores[m, n]:.1f}", ha="center", va="center")
    right.set(title="each diagonal, one score", aspect="equal")
    right.set(xlim=(-0.5, 5.5), ylim=(5.5, -0.5))
    right.set(xlabel="position n of the key", ylabel="position m of the query")
    return fig


@style.context(STYLE)
def layouts():
    """One head of 8 rows: which rows are a pair in each layout, and where `permute` puts each."""
    fig, ax = canvas(9, 3.75)
    order = permute(torch.arange(8), n_heads=1).tolist()  # the row that comes to each place
    cos, sin = compute_rope_params(8, context_length=2)
    units = apply_rope(torch.eye(8)[None, :, None], cos[1:], sin[1:])[0, :, 0]
    pairs = [unit.nonzero().flatten().tolist() for unit in units[:4]]  # places that turn together
    x = [1.9 + 0.9 * place for place in range(8)]
    for place, row in enumerate(order):
        box(ax, x[row], 3, f"row {row}", POSITIONS, width=0.75)
        box(ax, x[place], 1.6, f"row {row}", POSITIONS, width=0.75)
        arrow(ax, (x[row], 2.8), (x[place], 1.8), linestyle="-" if row % 2 == 0 else "--")
    for number, (a, b) in enumerate(pairs):
        bracket(ax, x[order[a]], x[order[b]], 3.2, 3.45, f"pair {number}")
        bracket(ax, x[a], x[b], 1.4, 1.1 - 0.28 * number, f"pair {number}")
    ax.text(0.75, 3, "interleaved:\nMeta's .pth,\nGGUF", ha="center", va="center")
    ax.text(0.75, 2.3, "permute", ha="center", va="center", style="italic")
    ax.text(0.75, 1.6, "half-split:\nHugging Face,\nthis course", ha="center", va="center")
    return fig


def bracket(ax, left, right, start, end, text):
    """Join two boxes above or below them, and name what they are together."""
    ax.plot([left, left, right, right], [start, end, end, start], color=POSITIONS)
    ax.text(left + 0.45, end, text, ha="center", va="center", backgroundcolor="white")


# 06: grouped-query attention


@style.context(STYLE)
def attention_groups(n_heads=8, n_kv_groups=2):
    """Which query head reads which key/value head: one each, in groups, all the same one."""
    fig, ax = canvas(9, 3.3)
    for y, text in ((2.5, "query\nheads"), (1.5, "keys"), (1.05, "values"), (0.4, "cached")):
        ax.text(0.45, y, text, ha="center", va="center")
    for panel, groups in enumerate((n_heads, n_kv_groups, 1)):
        draw_groups(ax, 1.05 + 2.68 * panel, n_heads, groups)
    return fig


def draw_groups(ax, left, n_heads, n_kv_groups):
    """Query heads above, key/value heads below, a line from each to the one that it reads."""
    name = GroupedQueryAttention.label({"n_heads": n_heads, "n_kv_groups": n_kv_groups})
    pitch, width = 2.5 / n_heads, 2.1 / n_heads
    x = left + pitch * (np.arange(n_heads) + 0.5)
    reads = torch.arange(n_kv_groups).repeat_interleave(n_heads // n_kv_groups).numpy()
    places = [x[reads == group].mean() for group in range(n_kv_groups)]
    for head, group in enumerate(reads):
        ax.plot([x[head], places[group]], [2.33, 1.67], color=INK, linewidth=1.2, zorder=0.5)
        box(ax, x[head], 2.5, f"{head}", KEPT, width=width, height=0.34, change="kept")
    for group, place in enumerate(places):
        for y in (1.5, 1.05):
            box(ax, place, y, f"{group}", ATTENTION, width=width, height=0.34)
    ax.text(left + 1.25, 3, name, ha="center", va="center", size=12)
    ax.text(left + 1.25, 0.4, f"{2 * n_kv_groups} vectors per token", ha="center", va="center")


@style.context(STYLE)
def cache_memory():
    """The cache of one text in two models, with three numbers of key/value heads."""
    fig, axes = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
    models = (("Llama 3.1 8B", LLAMA31_CONFIG_8B), ("Llama 3.2 1B", LLAMA32_CONFIG_1B))
    for ax, (name, cfg) in zip(axes, models, strict=True):
        draw_cache(ax, name, cfg)
    return fig


def draw_cache(ax, name, cfg):
    """Cache against context, both on log scales, and the weights as a line to compare with."""
    longest = cfg.context_length
    tokens = np.array([longest // 128, longest])
    for groups, line in ((cfg.n_heads, "-"), (cfg.n_kv_groups, "--"), (1, ":")):
        changed = {**cfg, "n_kv_groups": groups, "context_length": 1}  # no long RoPE tables
        with torch.device("meta"):
            model = Llama3Model(changed)
            gib = [KVCache(model, 1, int(t)).cache_bytes / 2**30 for t in tokens]
        width = 3 if groups == cfg.n_kv_groups else 2
        ax.loglog(tokens, gib, line, color=ATTENTION, linewidth=width)
        kind = GroupedQueryAttention.label(changed).removesuffix(", 4 to 1")
        ax.text(longest * 1.25, gib[-1], f"{kind}\n{gib[-1]:g} GiB", va="center")
        if groups == cfg.n_kv_groups:
            weights = count_parameters(model)[0] * cfg.dtype.itemsize / 2**30
    ax.axhline(weights, color=KEPT, linewidth=1)
    ax.text(tokens[0] * 1.15, weights * 1.15, f"weights: {weights:.1f} GiB", va="bottom")
    ax.set(title=f"{name}, one text", xlabel="context (tokens, log scale)")
    ax.set(ylabel="cache in bfloat16 (GiB, log scale)", ylim=(0.003, 100))
    ax.set_xticks([longest // 128, longest // 16, longest])
    ax.set_xlim(tokens[0], longest)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.minorticks_off()


# 07: rescaled frequencies


@style.context(STYLE)
def rope_rescaling():
    """Each pair's speed against its wavelength, before and after the rescaling, 8B and 1B."""
    fig, axes = plt.subplots(1, 2, figsize=(9, 4.6), layout="constrained", sharey=True)
    draw_rescaling(axes[0], "Llama 3.1 8B", LLAMA31_CONFIG_8B)
    draw_rescaling(axes[1], "Llama 3.2 1B", LLAMA32_CONFIG_1B)
    return fig


def draw_rescaling(ax, name, cfg):
    """The three bands of one model, the speeds before as a line, those after as points."""
    head_dim, freq = cfg.emb_dim // cfg.n_heads, cfg.rope_freq
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    before = cfg.rope_base**-exponents
    after, wavelength = rescale(before, freq), 2 * math.pi / before  # tokens
    kept, divided = after == before, after == before / freq["factor"]
    ax.loglog(wavelength, before, "--", color=KEPT)
    ax.loglog(wavelength, after, "o", color=POSITIONS, markersize=4)
    low, high = (
        freq["original_context_length"] / freq[f"{f}_freq_factor"] for f in ("low", "high")
    )
    ax.axvspan(high, low, color=tint(POSITIONS, 0.2), linewidth=0)
    ax.text(5, 1.2e-8, f"{kept.sum()} pairs\nunchanged", va="center")
    blended = len(after) - kept.sum() - divided.sum()
    ax.text((low * high) ** 0.5, 20, f"{blended} pairs blended,\n{high:,.0f} to {low:,.0f}",
            ha="center", va="center")  # fmt: skip
    ax.text(4e6, 1.2e-8, f"{divided.sum()} pairs\ndivided by {freq['factor']:g}",
            ha="right", va="center")  # fmt: skip
    ax.text(7e4, 4e-4, "before", va="center")
    ax.text(4e4, 1e-6 if freq["factor"] > 8 else 4e-6, "after", ha="right", va="center")
    ax.set(title=f"{name}, head of {head_dim}", xlabel="wavelength before, in tokens (log scale)")
    ax.set(ylabel="radians per token (log scale)")
    ax.set(xlim=(3, 6e6), ylim=(4e-9, 100), xticks=(10, 1e3, 1e5), yticks=(1, 1e-2, 1e-4, 1e-6))
    ax.minorticks_off()
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    ax.yaxis.set_major_formatter(lambda value, _: np.format_float_positional(value, trim="-"))


# 08: tokenizers


@style.context(STYLE)
def tokens_per_character():
    """Tokens for each character of one text in many languages, by three tokenizers."""
    fig, ax = plt.subplots(figsize=(9, 5.4), layout="constrained")
    marks = {
        "GPT-2": ("o", "white", KEPT),
        "Llama 2": ("s", KEPT, KEPT),
        "Llama 3": ("D", INK, INK),
    }
    gains = {name: tokens["GPT-2"] / tokens["Llama 3"] for name, tokens in COUNTS.items()}
    rows = sorted(gains, key=gains.get)
    for y, language in enumerate(rows):
        rates = {n: count / len(TEXTS[language]) for n, count in COUNTS[language].items()}
        ax.plot([min(rates.values()), max(rates.values())], [y, y], color=KEPT, linewidth=1)
        for name, (marker, face, edge) in marks.items():
            at = {"markerfacecolor": face, "markeredgecolor": edge, "markeredgewidth": 1.6}
            ax.plot(rates[name], y, marker, markersize=8, zorder=3, **at)
        ax.text(2.84, y, f"{gains[language]:.1f}", ha="center", va="center")
    for name, count in COUNTS[rows[-1]].items():
        rate = count / len(TEXTS[rows[-1]])
        ax.text(rate, len(rows) - 0.6, f"{name}: {rate:.2f}", ha="center")
    ax.text(2.84, len(rows) - 0.6, "GPT-2 / Llama 3", ha="center")
    ax.set(xlim=(0, 3.15), ylim=(-0.6, len(rows) + 0.1), xlabel="tokens per character")
    ax.set_yticks(range(len(rows)), rows)
    ax.set_ylabel("article 1 of the Universal Declaration, and code")
    ax.set_xticks([0, 0.5, 1, 1.5, 2])
    return fig


# 09: all generations


@style.context(STYLE)
def generations_blocks(names=("GPT-2", "Llama 2", "Llama 3.2")):
    """The blocks of three families; a plus or minus marks what differs from the column before."""
    fig, ax = canvas(9, 8.3)
    before = names[0]
    for column, name in enumerate(names):
        changed = {row for row, _, _ in diff_families(before, name)}
        draw_column(ax, 0.1 + 3 * column, name, changed)
        before = name
    return fig


def draw_column(ax, left, name, changed):
    """One family from top to bottom, 2.8 inches wide, the rows in `changed` marked."""
    family = lookup(name)
    rows = describe(*family)
    stream, middle = left + 0.2, left + 1.6

    def part(y, row, text, x=middle, width=2.1, height=0.38):
        """A box with one row of the parts table; what has gone is dashed."""
        if row in changed:
            change = "removed" if rows[row] == "none" else "added"
        elif rows[row] == "none":
            ax.text(x, y, text, ha="center", va="center")
            return
        else:
            change = "kept"
        colour = COLOURS.get(row, INK)
        box(ax, x, y, text, colour, width=width, height=height, change=change, row=row)

    def step(y, row):
        """Norm, then a step; what they make is added to the stream at its left."""
        arrow(ax, (stream, y), (middle - 1.05, y))
        part(y, "norm", rows["norm"])
        arrow(ax, (middle, y - 0.19), (middle, y - 0.41))
        part(y - 0.71, row, f"{row}:\n{rows[row]}", height=0.6)
        arrow(ax, (middle, y - 1), (middle, y - 1.22), (stream + 0.12, y - 1.22))
        sign(ax, stream, y - 1.22, "+")

    ax.text(left + 1.4, 8.08, name, ha="center", va="center", size=13, weight="bold")
    arrow(ax, (stream, 6.75), (stream, 1.62))
    part(7.55, "tokenizer", f"tokenizer:\n{rows['tokenizer']}", left + 1.4, 2.8, 0.6)
    box(ax, left + 1.4, 6.94, "embedding", INK, width=2.8, change="kept", row="embedding")
    if issubclass(family.model_class.parts.positions, LearnedPositions):
        text = f"{rows['positions']} positions,\nadded to the embeddings"
        arrow(ax, (middle - 1.05, 6.25), (stream + 0.12, 6.25))
        sign(ax, stream, 6.25, "+")
    else:
        text = textwrap.fill(rows["positions"], 20) + ",\nturns queries and keys"
    part(6.25, "positions", text, height=0.8)
    part(3.92, "block", "", left + 1.4, 2.8, 3.64)
    ax.text(middle, 5.52, "block, n_layers times", ha="center", va="center")
    step(5.1, "attention")
    step(3.5, "feed-forward")
    part(1.79, "norm", f"final norm: {rows['norm']}", left + 1.4, 2.8)
    part(1.32, "head", f"head: {rows['head']}", left + 1.4, 2.8)
    for number, row in enumerate(("biases", "dropout", "context")):
        part(0.88 - 0.34 * number, row, f"{row}: {rows[row]}", left + 1.4, 2.8, 0.3)


LINE = ("GPT-2", "Llama 1", "Llama 2", "Llama 3", "Llama 3.1", "Llama 3.2")


@style.context(STYLE)
def generations(names=LINE):
    """The parts table from GPT-2 to Llama 3.2: a bar lasts as long as its entry stays."""
    described = [describe(*lookup(name)) for name in names]
    left, column, gap = 1.2, 1.28, 0.08
    bars = {}  # row -> list of (first column, number of columns, text, lines)
    for row in described[0]:
        found = bars.setdefault(row, [])
        for at, entries in enumerate(described):
            if found and found[-1][2] == entries[row]:
                found[-1] = (found[-1][0], found[-1][1] + 1, entries[row])
            else:
                found.append((at, 1, entries[row]))
    texts = {
        row: [textwrap.fill(text, round(n * column * 9.2)) for _, n, text in found]
        for row, found in bars.items()
    }
    heights = {row: 0.2 + 0.2 * max(t.count("\n") + 1 for t in texts[row]) for row in bars}
    fig, ax = canvas(9, 0.55 + sum(heights.values()) + gap * len(heights))
    y = ax.get_ylim()[1] - 0.25
    for at, name in enumerate(names):
        x = left + column * (at + 0.5)
        ax.text(x, y, name, ha="center", va="center", size=12, weight="bold")
    y -= 0.25
    for row, found in bars.items():
        y -= heights[row] + gap
        middle = y + heights[row] / 2
        ax.text(left - 0.1, middle, row.replace(" epsilon", "\nepsilon"), ha="right", va="center")
        for (at, n, entry), text in zip(found, texts[row], strict=True):
            change = "removed" if entry == "none" else "added" if at else "kept"
            x, width = left + column * (at + n / 2), column * n - gap
            size = {"width": width, "height": heights[row]}
            box(ax, x, middle, text, COLOURS.get(row, INK), **size, change=change, row=row)
    return fig


# 10: prefill and decode


@style.context(STYLE)
def prefill_decode():
    """Which tokens each call of a generating loop computes and which it reads, for 4 new tokens."""
    fig, ax = canvas(9, 3.9)
    draw_calls(ax, 0.15, "without a cache", cached=False)
    draw_calls(ax, 4.75, "with a cache", cached=True)
    ax.text(4.5, 0.25, "filled: computed in this call      empty: kept keys and values, read only")
    ax.texts[-1].set(ha="center", va="center")
    return fig


def draw_calls(ax, left, title, cached, prompt=4, new=4):
    """One row of tokens for each call, from a prompt to its last new token."""
    ax.text(left + 2.15, 3.65, title, ha="center", va="center", size=12, weight="bold")
    ax.text(left + 2.15, 3.25, "position", ha="center", va="center")
    ax.text(left + 3.85, 3.25, "computed", ha="center", va="center")
    x = [left + 1.05 + 0.37 * position for position in range(prompt + new - 1)]
    for position, place in enumerate(x):
        ax.text(place, 2.92, f"{position}", ha="center", va="center")
    together = 0
    for call in range(new):
        y, length = 2.55 - 0.42 * call, prompt + call
        first = length - 1 if cached and call else 0
        name = ("decode" if call else "prefill") if cached else f"call {call + 1}"
        ax.text(left, y, name, va="center")
        for position in range(length):
            fill = tint(ATTENTION, 0.55) if position >= first else "white"
            edge = ATTENTION if position >= first else KEPT
            corner = (x[position] - 0.15, y - 0.15)
            ax.add_patch(Rectangle(corner, 0.3, 0.3, facecolor=fill, edgecolor=edge, linewidth=1.5))
        ax.text(left + 3.85, y, f"{length - first}", ha="center", va="center")
        together += length - first
    ax.text(left, 0.83, "together", va="center")
    ax.text(left + 3.85, 0.83, f"{together}", ha="center", va="center", weight="bold")


# 11: the limit


@style.context(STYLE)
def roofline(result):
    """Tokens per second over bytes per token: the line that memory sets, and what was measured.

    `result` is what helpers.benchmark.benchmark returns.
    """
    bandwidth = result["bandwidth_bytes_per_second"]
    rows = {n: r for n, r in result["rows"].items() if "tokens_per_second" in r}
    size = max(row["bytes_per_token"] for row in rows.values())
    fig, ax = plt.subplots(figsize=(9, 5.2), layout="constrained")
    reach = np.array([size / 20, size * 20])
    lowest = min([row["tokens_per_second"] for row in rows.values()] + [bandwidth / reach[1]])
    ax.loglog(reach / 1e9, bandwidth / reach, color=INK, linewidth=2)
    ax.fill_between(reach / 1e9, bandwidth / reach, bandwidth / reach[0], color=tint(KEPT, 0.15))
    ax.set(xlim=reach / 1e9, ylim=(lowest / 2, bandwidth / reach[0]))
    ax.text(
        size * 3 / 1e9,
        bandwidth / size,
        f"no program gets here:\nmemory gives {bandwidth / 1e9:,.0f} GB/s",
    )
    ordered = sorted(rows.items(), key=lambda item: item[1]["tokens_per_second"])
    step = 1.28  # labels at least so far apart, as a factor
    place = lowest / 2
    for name, row in ordered:
        speed = row["tokens_per_second"]
        place = max(place * step, speed)
        x, label = row["bytes_per_token"] / 1e9, size / 1e9 / 2.2
        ax.plot([x, label], [speed, place], color=KEPT, linewidth=0.8)
        ax.plot(x, speed, "o", color=ATTENTION, markersize=8, zorder=3)
        text = f"{name}: {speed:.3g}, {row['share_of_limit']:.0%}"
        ax.text(label, place, text + " ", ha="right", va="center")
    ax.set(
        xlabel="bytes read per token in GB (log scale)",
        ylabel="tokens per second (log scale)",
        title=f"{result['model']}, {result['dtype']}, {result['machine']['name']}",
    )
    return fig


# Files

FIGURES = {
    "skeleton": skeleton,
    "gpt2-llama2-blocks": blocks,
    "norm-geometry": norm_geometry,
    "activations": activations,
    "gate": gate,
    "rotation": rotation,
    "clocks": clocks,
    "score-against-distance": score_against_distance,
    "layouts": layouts,
    "attention-groups": attention_groups,
    "cache-memory": cache_memory,
    "rope-rescaling": rope_rescaling,
    "tokens-per-character": tokens_per_character,
    "generations-blocks": generations_blocks,
    "generations": generations,
    "prefill-decode": prefill_decode,
}  # name of the file in images/ -> function

ALT = {
    "skeleton": "Token ids are embedded and get positions; n_layers blocks each add an attention "
    "and a feed-forward, both behind a norm, to the stream; a final norm and a head give logits",
    "gpt2-llama2-blocks": "From GPT-2 to Llama 2, LayerNorm becomes RMSNorm, learned positions "
    "become RoPE, GELU becomes SwiGLU, tokenizer and context change, biases, dropout and the tied "
    "head go; the block's wiring, multi-head attention and the norm's epsilon stay",
    "norm-geometry": "RMSNorm moves every vector along its own ray to a circle or a sphere; "
    "LayerNorm first removes the part along (1, 1, 1), so that it reaches only two points of the "
    "circle and one circle of the sphere",
    "activations": "SiLU and GELU dip below zero left of the origin, SiLU wider and deeper, and "
    "approach ReLU far from it; their gradients pass 1 smoothly where ReLU's jumps from 0 to 1",
    "gate": "One matrix makes a gate that passes SiLU, a second a value, a third narrows their "
    "product; with a negative gate the product stays between -1.1 and 1.1, with a positive one it "
    "grows with both",
    "rotation": "A query turns by 0.32 radians from each of eight positions to the next; a query "
    "and a key three positions apart enclose the same angle and score 0.696 wherever they stand",
    "clocks": "The first pair of a head of 64 turns once in 6.3 tokens, the last in 47,117, a "
    "straight line on a log scale; at position 100 the hands of slow pairs have hardly moved",
    "score-against-distance": "The score of a query and a key of ones falls in ripples from 64.0 "
    "to about a third at a distance of 256 tokens, the same from key position 0, 1,000 and 3,000",
    "layouts": "In the interleaved layout rows 0 and 1, 2 and 3, 4 and 5, 6 and 7 are pairs; "
    "permute orders them 0, 2, 4, 6, 1, 3, 5, 7, so that a pair stands four places apart",
    "attention-groups": "Eight query heads: in multi-head attention each reads its own key and "
    "value head, in grouped-query attention heads 0 to 3 read head 0 and heads 4 to 7 head 1, in "
    "multi-query attention all read head 0; 16, 4 and 2 vectors are cached per token",
    "cache-memory": "On log scales the cache grows in three parallel lines; at 131,072 tokens "
    "Llama 3.1 8B needs 64 GiB with multi-head, 16 with grouped-query and 2 with multi-query "
    "attention beside 15.0 GiB of weights, Llama 3.2 1B a quarter of each beside 2.3 GiB",
    "rope-rescaling": "Pairs with wavelengths up to 2,048 tokens keep their speed, those beyond "
    "8,192 turn 8 times slower in Llama 3.1 8B (29 of 64) and 32 times slower in Llama 3.2 1B (14 "
    "of 32); in between a curve joins the two lines without a jump",
    "tokens-per-character": "Korean falls from 2.26 tokens per character with GPT-2 and 1.59 with "
    "Llama 2 to 0.60 with Llama 3; Russian, Hindi, Greek, Arabic, Chinese and Japanese fall to "
    "half or less, code, German, Spanish and French by less, and English stays where it was",
    "generations-blocks": "From GPT-2 to Llama 2, norms, positions, feed-forward, tokenizer and "
    "head change, biases and dropout go; from Llama 2 to Llama 3.2, attention becomes "
    "grouped-query, positions are rescaled, the head is tied again; the order of the steps stays",
    "generations": "Of eleven parts in six generations, norm, feed-forward, biases and dropout "
    "change once, at Llama 1, attention once, at Llama 3, the head twice, positions at Llama 1 and "
    "in each step from Llama 3 on, the block's wiring never",
    "prefill-decode": "Without a cache four calls compute 4, 5, 6 and 7 tokens, 22 together; with "
    "a cache the prefill computes the prompt of 4 and each decode step 1 token, 7 together, and "
    "reads the kept keys and values of those before",
}  # what each image shows, for readers who do not see it


@style.context(STYLE)
def svg(name):
    """The bytes of one image: the same on every run, without a date."""
    figure, file = FIGURES[name](), io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    return file.getvalue()


def save_all(folder=IMAGES):
    """Write every figure to `folder` as NAME.svg."""
    folder = Path(folder)
    folder.mkdir(exist_ok=True)
    for name in FIGURES:
        (folder / f"{name}.svg").write_bytes(svg(name))


def outdated(folder=IMAGES):
    """Names of the figures whose image in `folder` is missing or not what would be drawn now."""
    files = {name: Path(folder) / f"{name}.svg" for name in FIGURES}
    return [n for n, file in files.items() if not file.exists() or file.read_bytes() != svg(n)]


def main(arguments):
    plt.switch_backend("agg")  # no windows
    if not arguments:
        save_all()
    elif arguments == ["--check"]:
        if names := outdated():
            raise ValueError(f"would change: {', '.join(names)}; run python -m helpers.figures")
    else:
        raise ValueError("give no argument to write images/, or --check to compare them")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:
        sys.exit(f"error: {error}")
