import re
from browser.front import expect
from browser.test_live_panel import cell


def test_probe(front, gate):
    front.start(cell(10, f"print('from', rank)\n{gate.wait()}"))
    js = "() => [document.activeElement.tagName, document.activeElement.className, document.activeElement.getAttribute('aria-label')].join('|')"
    front.panel.get_by_role("button", name="Rank 0, RUNNING").focus()
    front.page.evaluate(
        "() => { window.keys=[]; for (const p of [true,false]) window.addEventListener('keydown', e => window.keys.push([p, e.key, e.target.className, e.defaultPrevented].join('|')), p); }"
    )
    print(front.page.evaluate(js))
    for _ in range(3):
        front.page.keyboard.press("ArrowRight")
        print(front.page.evaluate(js))
    print(front.page.evaluate("() => window.keys"))
