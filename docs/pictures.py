"""Draws the pictures in docs/images that aren't measurements:  python docs/pictures.py

They are SVG of a few shapes, the same bytes each time, with a ground of their own so that they are legible on dark pages too.
Sizes in them are those that the compressors tell.
"""

from html import escape
from pathlib import Path

from hvd_quant import TensorInfo, get_compressor, wire

IMAGES = Path(__file__).parent / "images"
INK, GREY, LINE, GROUND = "#1f2937", "#6b7280", "#9ca3af", "#ffffff"
TINTS = ["#c7d2fe", "#fde68a", "#bbf7d0", "#fecaca", "#e5e7eb"]
TENSOR = TensorInfo.whole("w", (1024, 1024))


def size(spec: str) -> int:
    """Bytes of a compressor's payload of :data:`TENSOR`."""
    return get_compressor(spec).payload_bytes(TENSOR)


def share(spec: str) -> str:
    """The same as a part of fp32."""
    return f"1/{4 * TENSOR.numel / size(spec):.0f}"


class Picture:
    """Shapes on a ground of ``width`` × ``height``."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.size = width, height
        self.parts = [f"<title>{escape(title)}</title>", f'<rect width="{width}" height="{height}" rx="8" fill="{GROUND}"/>']

    def text(self, x: float, y: float, said: str, size: int = 15, colour: str = INK, anchor: str = "middle", mono: bool = False,
             weight: int = 400) -> None:
        family = "ui-monospace, monospace" if mono else "system-ui, sans-serif"
        self.parts.append(f'<text x="{x:g}" y="{y:g}" font-family="{family}" font-size="{size}" font-weight="{weight}" fill="{colour}" '
                          f'text-anchor="{anchor}">{escape(said)}</text>')

    def box(self, x: float, y: float, width: float, height: float, fill: str, *said: str, mono: bool = False, size: int = 15) -> None:
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}" stroke="{LINE}"/>')
        for i, line in enumerate(said):
            middle = y + height / 2 + size * (0.35 + 1.25 * (i - (len(said) - 1) / 2))
            self.text(x + width / 2, middle, line, size, mono=mono)

    def arrow(self, x: float, y: float, to_x: float, to_y: float, colour: str = GREY) -> None:
        self.parts.append(f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{colour}" stroke-width="1.5" '
                          'marker-end="url(#head)"/>')

    def write(self, name: str) -> None:
        width, height = self.size
        head = (f'<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
                f'<path d="M0 0L8 4L0 8z" fill="{GREY}"/></marker></defs>')
        (IMAGES / name).write_text("\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">', head, *self.parts,
            "</svg>\n"]))


def worker(picture: Picture, i: int, first: str) -> int:
    """A worker's column down to what it does first, and where that begins."""
    x = 20 + 220 * i
    picture.text(x + 100, 30, f"worker {i}", weight=600)
    picture.box(x, 45, 200, 34, GROUND, "gradient + residual")
    picture.arrow(x + 100, 79, x + 100, 105)
    picture.text(x + 112, 97, first, 13, GREY, "start")
    return x


def allgather() -> None:
    """Three workers, each of whom gets every payload."""
    picture = Picture(680, 330, "allgather: every worker gets every payload, and adds them up in the order of ranks")
    for i in range(3):
        x = worker(picture, i, "encode")
        picture.box(x + 60, 107, 80, 30, TINTS[i], f"payload {i}", size=13)
        for j in range(3):
            picture.arrow(x + 100, 139, 20 + 220 * j + 37 + 62 * i, 196)
            picture.box(x + 10 + 62 * j, 198, 54, 26, TINTS[j], str(j), size=13)
        picture.arrow(x + 100, 226, x + 100, 258)
        picture.text(x + 112, 246, "decode, add up", 13, GREY, "start")
        picture.box(x, 260, 200, 34, GROUND, "the same mean")
    picture.text(340, 318, "sent by a worker: payload × (n − 1)", 14, GREY)
    picture.write("allgather.svg")


def sra() -> None:
    """Three workers, each of whom reduces a third of the tensor for all."""
    picture = Picture(680, 470, "sra: each worker reduces its range for all, and encodes the mean again")
    for i in range(3):
        x = worker(picture, i, "encode each")
        for j in range(3):
            picture.box(x + 10 + 62 * j, 107, 54, 26, TINTS[j], f"range {j}", size=12)
            picture.arrow(x + 37 + 62 * j, 135, 20 + 220 * j + 37 + 62 * i, 186)
            picture.box(x + 10 + 62 * j, 188, 54, 26, TINTS[i], f"from {j}", size=12)
        picture.arrow(x + 100, 216, x + 100, 246)
        picture.text(x + 112, 235, "mean, encode", 13, GREY, "start")
        picture.box(x + 60, 248, 80, 30, TINTS[i], f"mean of {i}", size=13)
        for j in range(3):
            picture.arrow(x + 100, 280, 20 + 220 * j + 37 + 62 * i, 334)
            picture.box(x + 10 + 62 * j, 336, 54, 26, TINTS[j], f"range {j}", size=12)
        picture.arrow(x + 100, 364, x + 100, 394)
        picture.text(x + 112, 384, "decode", 13, GREY, "start")
        picture.box(x, 396, 200, 34, GROUND, "the same mean")
    picture.text(6, 165, "alltoall", 13, GREY, "start")
    picture.text(6, 312, "allgather", 13, GREY, "start")
    picture.text(340, 456, "sent by a worker: 2 × payload × (n − 1) / n", 14, GREY)
    picture.write("sra.svg")


def payloads() -> None:
    """The header, and what the bodies of three codes are made of."""
    numel = TENSOR.numel
    picture = Picture(680, 500, "The header of a payload, and three bodies")
    picture.text(20, 30, f"Header: {wire.HEADER_BYTES} bytes", weight=600, anchor="start")
    fields = [(2, "HQ"), (1, "v"), (1, "fl"), (4, "codec"), (8, "numel"), (8, "body bytes"), (8, "checksum")]
    x = 20.0
    for i, (nbytes, said) in enumerate(fields):
        picture.box(x, 44, 20 * nbytes, 34, TINTS[(0, 4, 3, 1, 4, 4, 2)[i]], said, size=13)
        picture.text(x + 10 * nbytes, 94, str(nbytes), 12, GREY)
        x += 20 * nbytes
    picture.text(20, 118, "magic, version, flags (not finite, worker failed), what made it, how much of what, a check", 13, GREY, "start")

    def body(y: int, spec: str, explained: str, *parts: tuple[int, str]) -> None:
        assert size(spec) == wire.HEADER_BYTES + wire.padded(sum(nbytes for nbytes, _ in parts)), spec
        picture.text(20, y, spec, mono=True, anchor="start", weight=600)
        picture.text(660, y, f"{size(spec):,} bytes of 1024 × 1024 entries: {share(spec)} of fp32", 13, GREY, "end")
        x, scale = 20.0, 640 / sum(nbytes for nbytes, _ in parts)
        for i, (nbytes, said) in enumerate(parts):
            picture.box(x, y + 12, nbytes * scale, 34, TINTS[i], *([said] if said else []), size=13)
            x += nbytes * scale
        picture.text(20, y + 64, explained, 13, GREY, "start")

    blocks = numel // 2048
    body(158, "onebit", "two fp32 levels a block of 2048 entries, then a bit an entry: above or below zero",
         (8 * blocks, ""), (numel // 8, "signs"))
    slots = (size("topk") - wire.HEADER_BYTES - 8 - numel // 256) // 5 // 8 * 8
    body(258, "topk", "how many of each block of 256 are kept, where in their block, and their fp32 values",
         (8, ""), (numel // 256, ""), (slots, "places"), (4 * slots, "values"))
    body(358, "qsgd", "a scale a block, then 4 bits an entry: a level from −7 to 7",
         (size("qsgd") - wire.HEADER_BYTES - numel // 2, ""), (numel // 2, "levels"))
    picture.text(20, 460, "A tensor's payload has the same size in each step, so Horovod need not negotiate it anew.", 13, GREY, "start")
    picture.write("payloads.svg")


def choosing() -> None:
    """Questions, and what to take where the answer is yes."""
    rows = [
        (("Is it unknown whether the", "network is what you wait for?"), ('compression="auto"',),
         ("measures, and compresses what that", "makes faster; else fp16 or nothing")),
        (("Is half the bytes enough?",), ("fp16, bf16",), ("nothing to tune",)),
        (("Is there no memory for a residual", "(4 bytes an entry)?"), ("natural, qsgd, terngrad",),
         (", ".join(map(share, ("natural", "qsgd", "terngrad"))) + ", unbiased at random",)),
        (("Many workers, large matrices?",), ("powersgd",), ("its bytes don't grow with the workers",)),
        (("Is 1 % of the entries too much?",), ("topk:ratio=0.001,momentum=0.9,", "schedule=dgc"), ("with SGD without momentum",)),
        (("Do compressed gradients still take", "longer than backward?"), ("ModelAveragingOptimizer",),
         ("one exchange in many steps",)),
    ]
    picture = Picture(680, 88 * len(rows) + 84, "Which compressor to begin with")
    for i, (question, answer, why) in enumerate(rows):
        y = 12 + 88 * i
        picture.box(12, y, 276, 66, TINTS[4], *question, size=15)
        picture.arrow(288, y + 33, 350, y + 33)
        picture.text(317, y + 26, "yes", 13, GREY)
        picture.arrow(150, y + 66, 150, y + 87)
        picture.text(160, y + 82, "no", 13, GREY, "start")
        picture.box(352, y, 316, 66, TINTS[0])
        lines = [(line, 15, INK, True) for line in answer] + [(line, 13, GREY, False) for line in why]
        for j, (line, points, colour, mono) in enumerate(lines):
            picture.text(510, y + 38 + (22 if len(lines) < 3 else 19) * (j - (len(lines) - 1) / 2), line, points, colour, mono=mono,
                         weight=600 if mono else 400)
    y = 12 + 88 * len(rows)
    picture.box(12, y, 656, 56, TINTS[2])
    picture.text(340, y + 24, "adaptive, or topk:ratio=0.01", 16, mono=True, weight=600)
    picture.text(340, y + 44, f"{share('adaptive')} and {share('topk')} of the bytes: adaptive where layers are large", 13, GREY)
    picture.write("choosing.svg")


if __name__ == "__main__":
    for draw in (allgather, sra, payloads, choosing):
        draw()
