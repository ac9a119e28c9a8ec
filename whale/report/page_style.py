"""How the pages of Whale look: one style sheet, kept inside each page."""

from __future__ import annotations

STYLE = """
:root { --ink: #1f2933; --weak: #616e7c; --line: #d9e0e6; --page: #f3f5f7; --card: #ffffff; --strong: #24507a; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 14px/1.45 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1280px; margin: 0 auto; padding: 24px; }
h1 { font-size: 22px; margin: 0 0 4px; }
h2 { font-size: 16px; margin: 0 0 12px; }
p { margin: 0; }
.weak { color: var(--weak); }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 12px; margin: 20px 0; }
.fact, section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.fact { padding: 12px 16px; }
.fact b { display: block; font-size: 22px; color: var(--strong); line-height: 1.3; }
section { padding: 18px 20px; margin-bottom: 16px; overflow-x: auto; }
svg { display: block; max-width: 100%; height: auto; font-family: inherit; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 10px; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; white-space: nowrap; }
th { color: var(--weak); font-weight: 500; }
th.word, td.word { text-align: left; white-space: normal; }
tbody tr:last-child td { border-bottom: none; }
tr.best td { font-weight: 600; }
h1 + .weak { margin-bottom: 20px; }
footer { color: var(--weak); padding: 4px 4px 20px; }
"""
