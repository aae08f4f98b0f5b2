"""The report's style: readable at 390 px, on paper, and in the dark."""

CSS = """\
:root {
  --ink: #1b1b1b; --soft: #555; --paper: #fff; --panel: #f5f6f7; --rule: #d5d8dc;
  --link: #005a9c; --warn: #fff4d6; --warn-edge: #b07a00; --differs: #e6f0fa;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e9e9e9; --soft: #b4b8bd; --paper: #15181b; --panel: #1f2327; --rule: #3a4046;
    --link: #7db8ef; --warn: #3a2f10; --warn-edge: #d9a520; --differs: #1c3147;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0 auto; padding: 1.2rem 1rem 4rem; max-width: 74rem; color: var(--ink);
  background: var(--paper); font: 16px/1.55 system-ui, "Segoe UI", "DejaVu Sans", sans-serif;
  overflow-wrap: break-word;
}
a { color: var(--link); }
.skip { position: absolute; left: -99rem; }
.skip:focus { position: static; }
.name { margin: 0; color: var(--soft); font-family: ui-monospace, "DejaVu Sans Mono", monospace; }
h1 { margin: .2rem 0 .8rem; font-size: clamp(1.35rem, 4vw, 1.9rem); line-height: 1.25; }
h2 { margin: 2.6rem 0 .8rem; padding-top: .6rem; border-top: 2px solid var(--rule);
  font-size: 1.35rem; }
h3 { margin: 0 0 .4rem; font-size: 1rem; }
h4 { margin: 0 0 .3rem; font-size: .95rem; }
p { max-width: 48rem; }
.lead { font-size: 1.08rem; }
.badge { display: inline-block; margin: 0 0 1rem; padding: .15rem .7rem; border: 2px solid;
  border-radius: 1rem; font-weight: 600; }
.badge.yes { color: #00674f; background: #e3f5ef; }
.badge.no { color: #9c2a00; background: #fdeae2; }
.badge.unknown { color: #444; background: #eee; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(18rem, 1fr));
  gap: .1rem 1.6rem; margin: 0 0 1rem; }
.facts div { display: flex; gap: .6rem; padding: .2rem 0; border-bottom: 1px solid var(--rule);
  min-width: 0; }
.facts dt { flex: 0 0 6.5rem; color: var(--soft); }
.facts dd { margin: 0; min-width: 0; overflow-wrap: anywhere; }
nav ul { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; margin: 0; padding: 0;
  list-style: none; }
.warnings { margin: 1rem 0; padding: .7rem 1rem .7rem 2rem; background: var(--warn);
  border-left: 5px solid var(--warn-edge); max-width: 52rem; }
.warnings li + li { margin-top: .4rem; }
.table { margin: 1.4rem 0 2rem; }
.scroll { overflow-x: auto; border: 1px solid var(--rule); }
.scroll:focus-visible { outline: 3px solid var(--link); }
.long { max-height: 34rem; overflow-y: auto; }
table { border-collapse: collapse; width: 100%; font-size: .88rem;
  font-variant-numeric: tabular-nums; }
.dense { font-size: .8rem; }
.dense th, .dense td { padding: .3rem .45rem; }
.dense .short:not(.word) { white-space: normal; }
.title { margin: 0 0 .4rem; font-weight: 600; }
th, td { padding: .3rem .7rem; text-align: left; vertical-align: top;
  border-top: 1px solid var(--rule); }
thead th { background: var(--panel); position: sticky; top: 0; z-index: 1; vertical-align: bottom; }
tbody th { font-weight: 500; }
td.number, th.number { text-align: right; white-space: nowrap; }
.short, thead th { white-space: nowrap; }
thead th.number { white-space: normal; }
.phrase { min-width: 11rem; }
.prose { min-width: 17rem; }
td.differs { background: var(--differs); }
tbody tr:hover > * { background: var(--panel); }
.note { margin: .5rem 0 0; color: var(--soft); font-size: .88rem; }
.files { white-space: nowrap; }
.sources { margin-top: .3rem; color: var(--soft); font-size: .84rem; }
figure { margin: 1.6rem 0 2rem; }
figure img { display: block; max-width: 100%; height: auto; background: #fff;
  border: 1px solid var(--rule); padding: .4rem; }
figcaption { margin-top: .5rem; max-width: 48rem; color: var(--soft); font-size: .9rem; }
.folders { columns: 17rem; padding-left: 1.1rem; font-size: .85rem; }
.folders span { color: var(--soft); }
.sample { margin: 1.4rem 0; padding: .9rem 1rem; background: var(--panel); }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(14rem, 1fr)); gap: .8rem; }
.columns > div { min-width: 0; padding: .6rem .7rem; background: var(--paper);
  border-top: 4px solid #767676; }
.columns > .right { border-top-color: #009e73; }
.columns > .wrong { border-top-color: #d55e00; border-top-style: dashed; }
pre { margin: 0 0 .5rem; max-height: 18rem; overflow: auto; white-space: pre-wrap;
  overflow-wrap: anywhere; font: .84rem/1.45 ui-monospace, "DejaVu Sans Mono", monospace; }
.verdict { margin: 0; font-size: .82rem; color: var(--soft); }
@media (max-width: 40rem) {
  .facts { grid-template-columns: 1fr; }
  th, td { padding: .3rem .5rem; }
  .wide { overflow-x: auto; }
  .wide img { max-width: none; width: 42rem; }
}
@media print {
  :root { --ink: #000; --soft: #333; --paper: #fff; --panel: #f2f2f2; --rule: #bbb;
    --link: #000; --warn: #fff; --warn-edge: #000; --differs: #e8e8e8; }
  @page { margin: 1.5cm; }
  html { font-size: 9.5pt; }  /* all other sizes are in rem */
  body { padding: 0; max-width: none; font-size: 1rem; }
  p, .warnings, figcaption { max-width: none; }
  nav, .skip, .sources, .files { display: none; }
  .scroll, .long, pre { overflow: visible; max-height: none; }
  table, .dense { font-size: 6.8pt; }
  th, td, .dense th, .dense td { padding: .15rem .25rem; }
  td.number, th.number, .short { white-space: normal; }
  .word { white-space: nowrap; }
  .phrase, .prose { min-width: 7rem; }
  thead th { position: static; white-space: normal; }
  tr, figure, .sample .columns > div { break-inside: avoid; }
  h2, h3, .title { break-after: avoid; }
  figure img { max-height: 11cm; border: 0; }
}
"""
