"""Screenshots of a scripted browser: makes `data/screenshots`, three tasks with tries that fail and go on.

    python examples/browser_sessions.py [FOLDER]

Needs Chromium and the playwright package; the pages are the ones below. A try that goes wrong is taken up again at one
of its turns, where the next try acts differently. Each call of the agent sees the last three screenshots; of older ones
a note is left, which rewrites every later context. A record is a try, with the calls that it made itself.
"""

import hashlib
import io
import json
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

WIDTH, HEIGHT, COLOURS, WINDOW = 448, 336, 32, 3
STYLE = """<style>body{font:15px sans-serif;margin:0;color:#223} header{background:#246;color:#fff;padding:9px 14px}
main{padding:10px 14px} .row{display:flex;justify-content:space-between;border-bottom:1px solid #ccd;padding:5px 0}
button,a.b{background:#e8eef6;border:1px solid #89a;border-radius:4px;padding:2px 9px;color:#124} .bad{color:#b22}
.good{color:#272;font-weight:bold} td{border:1px solid #ccd;padding:6px 12px} td.full{background:#ddd}</style>"""
SHOP = """<header>Lamp shop <span id=n style="float:right">cart: 0</span></header><main id=m></main><script>
const goods=[["Desk lamp",24],["Floor lamp",79],["Night light",12],["Work light",35]];let cart=[];
function list(){m.innerHTML=goods.map((g,i)=>`<div class=row><span>${g[0]}</span><span>${g[1]} EUR
<button onclick="cart.push(${i});n.textContent='cart: '+cart.length">Add ${g[0]}</button></span></div>`).join("")+
"<p><button onclick=show()>Cart</button></p>"}
function show(){m.innerHTML=cart.map((i,k)=>`<div class=row><span>${goods[i][0]}</span><button
onclick="cart.splice(${k},1);n.textContent='cart: '+cart.length;show()">Remove ${goods[i][0]}</button></div>`).join("")+
`<p>Total ${cart.reduce((s,i)=>s+goods[i][1],0)} EUR</p><button onclick=list()>Back</button>
<button onclick="m.innerHTML='<p class=good>Ordered: '+cart.map(i=>goods[i][0])+'</p>'">Order</button>`}
list()</script>"""
SETTINGS = """<header>Settings</header><main><div class=row>Newsletter <button id=a onclick=f(a)>on</button></div>
<div class=row>Dark theme <button id=b onclick=f(b)>off</button></div>
<div class=row>Two-factor login <button id=c onclick=f(c)>off</button></div>
<div class=row>Phone <input id=p placeholder="needed for two-factor login"></div>
<p><button onclick="s.className=c.textContent=='on'&&!p.value?'bad':'good';
s.textContent=s.className=='bad'?'Not saved: a phone number is missing.':'Saved.'">Save</button> <span id=s></span></p>
</main><script>function f(x){x.textContent=x.textContent=="on"?"off":"on"}</script>"""
CALENDAR = """<header>Meeting room</header><main><table id=t></table><p id=s></p></main><script>
const full=["Mon 9","Mon 11","Tue 9","Wed 11"],days=["Mon","Tue","Wed"];let chosen="";
t.innerHTML=days.map(d=>"<tr>"+[9,11,14].map(h=>`<td id="${d}${h}" class="${full.includes(d+" "+h)?"full":""}"
onclick="pick('${d} ${h}')">${d} ${h}:00</td>`).join("")+"</tr>").join("");
function pick(x){if(full.includes(x)){s.innerHTML="<span class=bad>"+x+":00 is taken.</span>";return}
chosen=x;s.innerHTML="Book "+x+":00? <button onclick=book()>Confirm</button>"}
function book(){s.innerHTML="<span class=good>Booked "+chosen+":00.</span>"}</script>"""
# Task, page, what success shows, and tries: (earlier try and its turn to go on from, or None; actions from there).
TASKS = (
    ("Order the cheapest lamp, and nothing else.", SHOP, "Ordered: Night light", (
        (None, ["Add Desk lamp", "Add Night light", "Cart", "Order"]),
        ((0, 3), ["Remove Desk lamp", "Order"]),
        ((0, 0), ["Add Night light", "Cart", "Order"]),
        ((1, 3), ["Back", "Cart", "Remove Desk lamp", "Order"]),
    )),
    ("Turn two-factor login on and the newsletter off, with the phone 555-0100, and save.", SETTINGS, "Saved.", (
        (None, ["#c", "Save", "#a", "Save"]),
        ((0, 2), ["#p=555-0100", "Save", "#a", "Save"]),
        ((0, 1), ["#a", "#p=555-0100", "Save"]),
    )),
    ("Book the first free slot on Tuesday.", CALENDAR, "Booked Tue 11:00.", (
        (None, ["#Tue9", "#Mon14", "Confirm"]),
        ((0, 1), ["#Tue14", "Confirm"]),
        ((0, 1), ["#Tue11", "Confirm"]),
        ((2, 2), ["#Mon9", "#Tue11", "Confirm"]),
    )),
)  # fmt: skip


def act(page: Page, action: str) -> None:
    """Clicks a button by its text or an element by its id (`#id`), or fills one in (`#id=text`)."""
    target, _, text = action.partition("=")
    place = page.locator(target) if target.startswith("#") else page.get_by_role("button", name=target, exact=True)
    if text:
        place.fill(text)
    else:
        place.click()


def screenshot(page: Page, folder: Path) -> str:
    """The name of a small PNG of what the page shows; equal ones are one file."""
    page.evaluate("document.activeElement && document.activeElement.blur()")
    shot = Image.open(io.BytesIO(page.screenshot(animations="disabled", caret="hide"))).convert("RGB").quantize(COLOURS)
    stream = io.BytesIO()
    shot.save(stream, "PNG", optimize=True)
    name = f"{hashlib.sha256(stream.getvalue()).hexdigest()[:12]}.png"
    (folder / name).write_bytes(stream.getvalue())
    return name


def record(task: str, shots: list[str], actions: list[str], first: int, reward: float) -> dict:
    """The calls of a try from turn `first` on."""
    pool = [
        {"role": "system", "content": "You use a browser. Answer with one action as JSON."},
        {"role": "user", "content": task},
    ]
    for turn, (shot, action) in enumerate(zip(shots, actions, strict=True)):
        text = {"type": "text", "text": f"Step {turn + 1}."}
        pool.append({"role": "user", "content": [{"type": "image", "image": shot}, text]})
        pool.append({"role": "user", "content": f"Step {turn + 1}. Its screenshot is no longer shown."})
        pool.append({"role": "assistant", "content": json.dumps({"action": action})})
    calls = []
    for turn in range(first, len(actions)):
        seen = [2 + 3 * before + (before <= turn - WINDOW) for before in range(turn + 1)]
        answers = [4 + 3 * before for before in range(turn)]
        context = [index for pair in zip(seen, [*answers, None], strict=True) for index in pair if index is not None]
        calls.append({"ctx": [0, 1, *context], "out": 4 + 3 * turn})
    return {"messages": pool, "calls": calls, "group": task, "reward": reward}


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "data" / "screenshots"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    lines = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for task, html, success, tries in TASKS:
            known: list[list[str]] = []
            for start, own in tries:
                actions = [*(known[start[0]][: start[1]] if start else []), *own]
                page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
                page.set_content(STYLE + html)
                shots = []
                for action in actions:
                    shots.append(screenshot(page, folder))
                    act(page, action)
                reward = float(success in page.inner_text("body"))
                lines.append(record(task, shots, actions, start[1] if start else 0, reward))
                known.append(actions)
                page.close()
        browser.close()
    (folder / "tries.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    print(f"{len(lines)} tries, {len(list(folder.glob('*.png')))} screenshots in {folder}")


if __name__ == "__main__":
    main()
