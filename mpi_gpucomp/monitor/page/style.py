"""The look of the page: kin to the benchmarks' report, light and dark, narrow and wide, on screen and on paper."""

from __future__ import annotations

__all__ = ["STYLE"]

STYLE = """
:root { --ground: #fff; --raised: #f6f7f9; --text: #191c21; --faint: #5c6570; --line: #dfe3e8; --link: #0b57b8;
  --good: #0a6b4b; --bad: #b3261e; --bad-ground: #fdeceb; --on-shade: #101317; --s0: #eceef1; --s1: #dbe9f8;
  --s2: #c3dcf5; --s3: #9cc7ef; --s4: #7bb4e8; --s5: #5fa3df; --slow: #f2b88d;
  --call: #c9ced6; --encode: #b07400; --send: #0057c2; --receive: #00809c; --decode: #00805c; --outside: #dfe3e8 }
@media screen and (prefers-color-scheme:dark) {
  :root { --ground: #14171c; --raised: #1d2127; --text: #e8eaed; --faint: #a3acb8; --line: #343a43; --link: #8ab8ff;
    --good: #5fd6a8; --bad: #ff8a80; --bad-ground: #45201d; --on-shade: #fff; --s0: #30353d; --s1: #2a3c4e;
    --s2: #234058; --s3: #214c70; --s4: #1f5788; --s5: #1c6db8; --slow: #a8501b;
    --call: #4b535f; --encode: #f0b429; --send: #5a9bff; --receive: #4cc9e0; --decode: #2fc79a; --outside: #343a43 }
}
* { box-sizing: border-box }
html { scroll-padding-top: 5rem; scroll-behavior: smooth }
body { margin: 0; background: var(--ground); color: var(--text);
  font: 16px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif }
header, main { max-width: 1240px; margin: 0 auto; padding: 0 20px }
header { display: flex; flex-wrap: wrap; align-items: center; gap: 6px 20px; padding-top: 12px; padding-bottom: 12px;
  background: var(--ground); border-bottom: 1px solid var(--line); position: sticky; top: 0; z-index: 5 }
main { padding-bottom: 60px }
h1 { font-size: 1.25rem; margin: 0; letter-spacing: -.01em }
h2 { font-size: 1.5rem; margin: 44px 0 14px; letter-spacing: -.02em }
nav { display: flex; flex-wrap: wrap; gap: 4px 14px; font-size: .9rem }
a { color: var(--link); text-decoration: none }
a:hover { text-decoration: underline }
a:focus-visible, [tabindex]:focus-visible, button:focus-visible { outline: 2px solid var(--link); outline-offset: 2px }
.hint { color: var(--faint); font-size: .875rem; margin: 8px 0; max-width: 70em }
.cards { display: grid; grid-template-columns: repeat(auto-fit,minmax(180px,1fr)); gap: 14px }
.card { background: var(--raised); border-radius: 12px; padding: 14px 18px 16px; border-top: 4px solid var(--good) }
.card .large { font-size: 2.1rem; font-weight: 700; line-height: 1.15; margin: 0; letter-spacing: -.03em }
.card .said { margin: 2px 0 0; font-size: .875rem; color: var(--faint) }
.card.bad { border-top-color: var(--bad) }
.card.bad .large { color: var(--bad) }
.alarms { list-style: none; margin: 0; padding: 0; font-size: .95rem }
.alarms li { padding: 8px 14px; border-left: 4px solid var(--bad); background: var(--bad-ground); margin: 6px 0;
  border-radius: 0 8px 8px 0; overflow-wrap: anywhere }
.alarms li.over { border-left-color: var(--line); background: var(--raised); color: var(--faint) }
.alarms time { font-variant-numeric: tabular-nums; margin-right: 10px; color: var(--faint) }
.none { padding: 12px 18px; background: var(--raised); border-radius: 8px; border-left: 4px solid var(--good) }
.scroll { overflow-x: auto; max-width: 100% }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .875rem }
caption { text-align: left; color: var(--faint); padding: 4px 0 6px }
th { font-weight: 600; text-align: left }
.figures td, .figures th { padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line); white-space: nowrap }
.figures td { text-align: right }
.figures td.wide { width: 30%; min-width: 180px; padding-right: 0 }
.figures th.number { text-align: right }
.bars span { display: block; height: 4px; border-radius: 2px; margin: 2px 0 }
.heat td, .heat thead th { text-align: center; min-width: 66px; padding: 0 }
.heat th { color: var(--faint); font-weight: 500; padding: 2px 10px 2px 0; white-space: nowrap }
.heat td { border: 2px solid var(--ground); border-radius: 6px; padding: 6px 8px; color: var(--on-shade) }
.heat td b { display: block; line-height: 1.25 }
.heat td small { display: block; font-size: .78rem; line-height: 1.2 }
.heat td.empty { background: var(--raised); color: var(--faint) }
.s0 { background: var(--s0) } .s1 { background: var(--s1) } .s2 { background: var(--s2) }
.s3 { background: var(--s3) } .s4 { background: var(--s4) } .s5 { background: var(--s5) }
.heat td.slow { background: var(--slow) }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; list-style: none; padding: 0; margin: 6px 0;
  font-size: .875rem }
.legend i { display: inline-block; width: 14px; height: 14px; border-radius: 3px; margin-right: 6px;
  vertical-align: -2px }
.encode { background: var(--encode) } .send { background: var(--send) } .receive { background: var(--receive) }
.decode { background: var(--decode) } .call { background: var(--call) } .outside { background: var(--outside) }
.tools { display: flex; flex-wrap: wrap; gap: 8px; align-items: center; margin: 8px 0; font-size: .875rem }
.tools button { font: inherit; color: var(--text); background: var(--raised); border: 1px solid var(--line);
  border-radius: 6px; padding: 3px 12px; cursor: pointer }
.tools button:hover { border-color: var(--faint) }
.tools output { color: var(--faint); font-variant-numeric: tabular-nums }
#timeline { width: 100%; display: block; cursor: grab; border: 1px solid var(--line); border-radius: 10px;
  touch-action: pan-y }
#timeline:active { cursor: grabbing }
#tip { position: absolute; z-index: 9; pointer-events: none; background: var(--raised); border: 1px solid var(--line);
  border-radius: 8px; padding: 8px 12px; font-size: .8rem; box-shadow: 0 4px 18px #0003; max-width: 340px;
  font-variant-numeric: tabular-nums; white-space: pre-line }
#tip[hidden] { display: none }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 20px; margin: 0; font-size: .9rem }
dt { color: var(--faint) }
dd { margin: 0; overflow-wrap: anywhere }
@media (max-width:560px) {
  header { position: static }
  header, main { padding-left: 14px; padding-right: 14px }
  .card .large { font-size: 1.7rem }
  h2 { margin-top: 32px }
  dl { grid-template-columns: 1fr }
}
@media print {
  header { position: static }
  nav, .tools { display: none }
  body { font-size: 11px }
  .card, .bars span, .heat td, .alarms li { print-color-adjust: exact; -webkit-print-color-adjust: exact }
}
"""
