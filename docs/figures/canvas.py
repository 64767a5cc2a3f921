"""A small SVG canvas: rectangles, lines and text, readable in light and dark. Colours are named by what they mean."""

from html import escape
from pathlib import Path

# name: (light, dark)
COLOURS = {
    "ink": ("#1c2430", "#e6e9ee"),
    "quiet": ("#667080", "#98a2b3"),
    "line": ("#b6bfcc", "#4b5565"),
    "shared": ("#2f6fb5", "#5b9be0"),
    "own": ("#6aa5de", "#2f5f92"),
    "repeated": ("#e2914a", "#c9772f"),
    "open": ("#8a6fc9", "#9d85dc"),
    "closed": ("#4fa37c", "#3f8f69"),
    "gradient": ("#c8455a", "#e0687b"),
    "blank": ("#dfe4ea", "#39424f"),
    "white": ("#ffffff", "#ffffff"),
}


class Canvas:
    """Shapes are kept in the order in which they are drawn."""

    def __init__(self, width: float, height: float, title: str, description: str) -> None:
        self.width, self.height = width, height
        self.head = f'<title id="t">{escape(title)}</title>\n<desc id="d">{escape(description)}</desc>'
        self.shapes: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, colour: str, *, faint: bool = False) -> None:
        """A filled rectangle; `faint` draws it at a third of its strength."""
        opacity = ' opacity=".35"' if faint else ""
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" class="f-{colour}"{opacity}/>'
        )

    def frame(self, x: float, y: float, width: float, height: float, colour: str = "line") -> None:
        """An outline."""
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" class="s-{colour}"/>'
        )

    def line(self, points: list[tuple[float, float]], colour: str = "line", *, arrow: bool = False) -> None:
        """Straight pieces through the points, with a head at the last one where `arrow`."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.shapes.append(f'<polyline points="{path}" class="s-{colour}"/>')
        if arrow:
            (x0, y0), (x, y) = points[-2:]
            length = ((x - x0) ** 2 + (y - y0) ** 2) ** 0.5
            ux, uy = (x - x0) / length * 6, (y - y0) / length * 6
            corners = [(x, y), (x - ux - uy / 2, y - uy + ux / 2), (x - ux + uy / 2, y - uy - ux / 2)]
            self.shapes.append(
                f'<polygon points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in corners)}" class="f-{colour}"/>'
            )

    def text(
        self, x: float, y: float, words: str, colour: str = "ink", *, anchor: str = "start", size: int = 13
    ) -> None:
        """`anchor`: start, middle or end."""
        self.shapes.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" class="f-{colour}">'
            f"{escape(words)}</text>"
        )

    def svg(self) -> str:
        """The document."""
        light, dark = (
            "".join(f".f-{k}{{fill:{v[i]}}}.s-{k}{{stroke:{v[i]}}}" for k, v in COLOURS.items()) for i in (0, 1)
        )
        style = (
            f"text{{font-family:system-ui,sans-serif}}{light}"
            "polyline,[class^=s-]{fill:none;stroke-width:1.5}"
            f"@media(prefers-color-scheme:dark){{{dark}}}"
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" '
            f'width="{self.width:g}" height="{self.height:g}" role="img" aria-labelledby="t d">\n{self.head}\n'
            f"<style>{style}</style>\n" + "\n".join(self.shapes) + "\n</svg>\n"
        )

    def save(self, path: Path) -> None:
        """Writes the document."""
        path.write_text(self.svg(), encoding="utf-8")
