"""The kinds of problem of the bundled model's tasks, one function `(random) -> Draft` each."""

import datetime
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Draft:
    """A problem before it is worded: its fields, the worked answer and what a checker compares."""

    fields: dict[str, str]
    answer: str
    target: object


# Arithmetic


def _columns(a: int, b: int) -> Iterator[tuple[int, int]]:
    """Digit pairs from the right, the shorter number padded with zeros."""
    width = max(len(str(a)), len(str(b)))
    return zip(map(int, f"{a:0{width}}"[::-1]), map(int, f"{b:0{width}}"[::-1]), strict=True)


def add(rng: random.Random) -> Draft:
    digits = rng.randint(2, 4)
    a, b = rng.randrange(10 ** (digits - 1), 10**digits), rng.randrange(10, 10**digits)
    lines, carry = [f"Add {a} and {b} from the right."], 0
    for x, y in _columns(a, b):
        total = x + y + carry
        lines.append(f"{x} + {y} + {carry}: write {total % 10}, carry {total // 10}")
        carry = total // 10
    return Draft({"a": str(a), "b": str(b)}, _final(lines, a + b), str(a + b))


def subtract(rng: random.Random) -> Draft:
    digits = rng.randint(2, 4)
    a = rng.randrange(10 ** (digits - 1) + 10, 10**digits)
    b = rng.randrange(10, a)
    lines, borrow = [f"Subtract {b} from {a} from the right."], 0
    for x, y in _columns(a, b):
        difference = x - y - borrow
        lines.append(f"{x} - {y} - {borrow}: write {difference % 10}, borrow {int(difference < 0)}")
        borrow = int(difference < 0)
    return Draft({"a": str(a), "b": str(b)}, _final(lines, a - b), str(a - b))


def multiply(rng: random.Random) -> Draft:
    a, b = rng.randrange(12, 10_000 if rng.random() < 0.5 else 1000), rng.randint(3, 9)
    lines, carry = [f"Multiply {a} by {b} from the right."], 0
    for x in map(int, str(a)[::-1]):
        total = x * b + carry
        lines.append(f"{x} x {b} + {carry}: write {total % 10}, carry {total // 10}")
        carry = total // 10
    return Draft({"a": str(a), "b": str(b)}, _final(lines, a * b), str(a * b))


def _final(lines: list[str], answer: object) -> str:
    return "\n".join([*lines, f"Answer: {answer}"])


# Word problems

NAMES = (
    "Anna Ben Carla David Elena Felix Grace Hugo Iris Jonas Kira Leo Maria Noah Olga Paul Rosa Sam "
    "Tina Victor Wendy Yusuf Zoe Amir Bella Chen Dora Emil Fatima Georg"
).split()
THINGS = (
    "pens books apples cards stamps marbles stickers coins shells buttons candles cookies pencils"
).split()


def _story(rng: random.Random, **numbers: int) -> dict[str, str]:
    name = rng.choice(NAMES)
    return {"name": name, "thing": rng.choice(THINGS), **{k: str(v) for k, v in numbers.items()}}


def packs(rng: random.Random) -> Draft:
    start, packs, size = rng.randint(5, 30), rng.randint(2, 7), rng.randint(3, 9)
    bought = packs * size
    given = rng.randint(2, 9)
    s = _story(rng, start=start, packs=packs, size=size, given=given)
    thing, total = s["thing"], start + bought
    lines = [
        f"{s['name']} buys {packs} x {size} = {bought} {thing}.",
        f"With the first {start} {thing} that makes {start} + {bought} = {total} {thing}.",
        f"After giving away {given} there are {total} - {given} = {total - given} {thing} left.",
    ]
    return Draft(s, _final(lines, total - given), str(total - given))


def shopping(rng: random.Random) -> Draft:
    count, price, fee = rng.randint(2, 7), rng.randint(2, 9), rng.randint(2, 12)
    cost = count * price + fee
    paid = (cost // 10 + rng.randint(1, 2)) * 10
    s = _story(rng, count=count, price=price, fee=fee, paid=paid)
    lines = [
        f"The {count} {s['thing']} cost {count} x {price} = {count * price} dollars.",
        f"With the delivery fee it is {count * price} + {fee} = {cost} dollars.",
        f"The change for {s['name']} is {paid} - {cost} = {paid - cost} dollars.",
    ]
    return Draft(s, _final(lines, paid - cost), str(paid - cost))


def sharing(rng: random.Random) -> Draft:
    people, each, kept = rng.randint(2, 7), rng.randint(2, 9), rng.randint(1, 9)
    extra = rng.randint(1, 40)
    total = people * each + kept
    if total <= extra:
        extra = total - 1
    s = _story(rng, first=total - extra, extra=extra, kept=kept, people=people)
    lines = [
        f"{s['name']} has {total - extra} + {extra} = {total} {s['thing']} in all.",
        f"Without the {kept} that stay there are {total} - {kept} = {total - kept} to share.",
        f"Each of the {people} friends gets {total - kept} / {people} = {each} {s['thing']}.",
    ]
    return Draft(s, _final(lines, each), str(each))


def saving(rng: random.Random) -> Draft:
    weekly, weeks, spent = rng.randint(3, 9), rng.randint(3, 7), rng.randint(2, 9)
    start = rng.randint(5, 30)
    saved = weekly * weeks
    total = start + saved
    left = total - spent
    s = _story(rng, weekly=weekly, weeks=weeks, spent=spent, start=start)
    lines = [
        f"In {weeks} weeks {s['name']} saves {weeks} x {weekly} = {saved} dollars.",
        f"Together with the first {start} dollars it is {start} + {saved} = {total} dollars.",
        f"After the {s['thing']} there are {total} - {spent} = {left} dollars.",
    ]
    return Draft(s, _final(lines, left), str(left))


# JSON extraction

CITIES = (
    "Oslo Paris Lima Cairo Berlin Madrid Tokyo Boston Dublin Prague Vienna Milan Quito Delhi"
).split()
JOBS = "nurse teacher baker driver lawyer painter farmer doctor writer pilot cook singer".split()
ITEMS = "lamp chair desk phone camera bottle jacket guitar carpet mirror basket helmet".split()
COLORS = "red blue green black white yellow brown grey".split()
MONTHS = (
    "January February March April May June July August September October November December"
).split()


def person(rng: random.Random) -> Draft:
    (name, friend), (city, other) = rng.sample(NAMES, 2), rng.sample(CITIES, 2)
    job, work = rng.sample(JOBS, 2)
    age, years = rng.randint(18, 80), rng.randint(18, 80)
    target = [
        {"name": name, "age": age, "city": city, "job": job},
        {"name": friend, "age": years, "city": other, "job": work},
    ]
    fields = {"name": name, "age": age, "city": city, "job": job}
    fields |= {"friend": friend, "years": years, "other": other, "work": work}
    return Draft({k: str(v) for k, v in fields.items()}, json.dumps(target), target)


def order(rng: random.Random) -> Draft:
    count, price = rng.randint(2, 12), rng.randint(3, 12)
    fields = {
        "name": rng.choice(NAMES), "item": rng.choice(ITEMS), "color": rng.choice(COLORS),
        "count": count, "price": price, "city": rng.choice(CITIES),
    }  # fmt: skip
    target = {
        "customer": fields["name"],
        "item": {"name": fields["item"], "color": fields["color"]},
        "count": count, "price": price, "total": count * price, "ship_to": fields["city"],
    }  # fmt: skip
    return Draft({k: str(v) for k, v in fields.items()}, json.dumps(target), target)


def event(rng: random.Random) -> Draft:
    month, day, year = rng.randint(1, 12), rng.randint(1, 28), rng.randint(2000, 2039)
    hour, guests = rng.randint(8, 20), rng.randint(10, 99)
    fields = {
        "name": rng.choice(NAMES), "city": rng.choice(CITIES), "month": MONTHS[month - 1],
        "day": day, "year": year, "hour": hour, "guests": guests,
        "what": rng.choice("concert meeting lecture party dinner workshop".split()),
    }  # fmt: skip
    target = {
        "event": fields["what"], "host": fields["name"], "city": fields["city"],
        "date": f"{year}-{month:02}-{day:02}", "time": f"{hour:02}:00", "guests": guests,
    }  # fmt: skip
    return Draft({k: str(v) for k, v in fields.items()}, json.dumps(target), target)


# Small Python functions

FUNCTION_NAMES = "solve compute process transform run apply select work".split()
LETTERS = "abcdefghijklmnoprstuvw"
# Beside random cases every function meets these: random ones alone let pass one in eight of the
# answers in which a single constant or comparison is off by one.
EVERY_NUMBER = [[x] for x in range(41)]
EVERY_ROTATION = [LETTERS[n:] + LETTERS[:n] for n in range(len(LETTERS))]


def _condition(rng: random.Random) -> tuple[str, str]:
    n = rng.randint(2, 20)
    return rng.choice(
        [
            ("even", "x % 2 == 0"),
            ("odd", "x % 2 == 1"),
            (f"greater than {n}", f"x > {n}"),
            (f"less than {n}", f"x < {n}"),
            (f"divisible by {n}", f"x % {n} == 0"),
            (f"not divisible by {n}", f"x % {n} != 0"),
            (f"different from {n}", f"x != {n}"),
        ]
    )


def _mapping(rng: random.Random) -> tuple[str, str]:
    n = rng.randint(2, 20)
    return rng.choice(
        [
            ("squares", "x * x"),
            (f"multiples by {n}", f"x * {n}"),
            (f"values plus {n}", f"x + {n}"),
            (f"values minus {n}", f"x - {n}"),
            ("cubes", "x * x * x"),
            (f"remainders by {n}", f"x % {n}"),
        ]
    )


def numbers(rng: random.Random) -> Draft:
    name = rng.choice(FUNCTION_NAMES)
    condition, test = _condition(rng)
    mapping, value = _mapping(rng)
    verb, start, update = rng.choice(
        [
            ("sum", "0", "total += {}"),
            ("list", "[]", "total.append({})"),
            ("product", "1", "total *= {}"),
        ]
    )
    fields = {"f": name, "verb": verb, "mapping": mapping, "condition": condition}
    code = (
        f"def {name}(numbers):\n    total = {start}\n    for x in numbers:\n        if {test}:\n"
        f"            value = {value}\n            {update.format('value')}\n    return total"
    )
    cases = [[rng.randint(0, 40) for _ in range(rng.randint(3, 8))] for _ in range(6)]
    return Draft(fields, code, _expected(code, name, [[], *cases, *EVERY_NUMBER]))


def strings(rng: random.Random) -> Draft:
    name, n = rng.choice(FUNCTION_NAMES), rng.randint(2, 9)
    old, new = rng.sample(LETTERS, 2)
    what, then = rng.choice(
        [
            ("reverse it", "text[::-1]"),
            ("make it upper case", "text.upper()"),
            (f"repeat it {n} times", f"text * {n}"),
            (f"keep the first {n} letters", f"text[:{n}]"),
            (f"drop the first {n} letters", f"text[{n}:]"),
        ]
    )
    fields = {"f": name, "old": old, "new": new, "what": what}
    code = (
        f"def {name}(text):\n    text = text.replace('{old}', '{new}')\n"
        f"    text = {then}\n    return text"
    )
    words = ["".join(rng.choices(LETTERS + old * 6, k=rng.randint(3, 14))) for _ in range(6)]
    return Draft(fields, code, _expected(code, name, ["", *words, *EVERY_ROTATION]))


def words(rng: random.Random) -> Draft:
    name, n, letter = rng.choice(FUNCTION_NAMES), rng.randint(2, 9), rng.choice(LETTERS)
    where, test = rng.choice(
        [
            ("start with", f"word.startswith('{letter}')"),
            ("end with", f"word.endswith('{letter}')"),
            ("contain", f"'{letter}' in word"),
        ]
    )
    length, size = rng.choice([("more", ">"), ("fewer", "<")])
    verb, start, update = rng.choice(
        [("count", "0", "found += 1"), ("list", "[]", "found.append(word)")]
    )
    fields = {
        "f": name,
        "verb": verb,
        "where": where,
        "letter": letter,
        "length": length,
        "n": str(n),
    }
    code = (
        f"def {name}(words):\n    found = {start}\n    for word in words:\n"
        f"        if {test} and len(word) {size} {n}:\n            {update}\n    return found"
    )
    pool = LETTERS + letter * 6
    cases = [
        ["".join(rng.choices(pool, k=rng.randint(1, 11))) for _ in range(rng.randint(3, 9))]
        for _ in range(6)
    ]
    every_place = [
        [word]
        for n in range(11)
        for word in (letter + "x" * n, "x" * n + letter, f"x{letter}" + "x" * n, "x" * (n + 1))
    ]
    return Draft(fields, code, _expected(code, name, [[], *cases, *every_place]))


def _expected(code: str, name: str, arguments: list) -> tuple[str, list]:
    """(name, [(argument, result)]) of a reference answer that this module wrote itself."""
    scope: dict[str, Callable] = {}
    exec(code, {}, scope)
    return name, [(argument, scope[name](argument)) for argument in arguments]


# Lists and dates


def sort(rng: random.Random) -> Draft:
    items = rng.sample(range(10, 100), rng.randint(4, 5))
    smallest = rng.random() < 0.5
    left, taken, lines = list(items), [], []
    while left:
        pick = min(left) if smallest else max(left)
        left.remove(pick)
        taken.append(pick)
        lines.append(f"Take {pick}, left: {_commas(left) or 'none'}")
    order = "smallest to largest" if smallest else "largest to smallest"
    fields = {"items": _commas(items), "order": order}
    return Draft(fields, _final(lines, _commas(taken)), _commas(taken))


def unique(rng: random.Random) -> Draft:
    pool = rng.sample(range(10, 100), 4)
    items = [rng.choice(pool) for _ in range(rng.randint(4, 6))]
    seen: list[int] = []
    lines = []
    for item in items:
        new = item not in seen
        if new:
            seen.append(item)
        lines.append(f"{item} is {'new, keep it' if new else 'known, drop it'}: {_commas(seen)}")
    answer = _commas(reversed(seen))
    return Draft({"items": _commas(items)}, _final(lines, answer), answer)


def later(rng: random.Random) -> Draft:
    day = datetime.date(rng.randint(2000, 2039), rng.randint(1, 12), rng.randint(1, 28))
    days = rng.randint(5, 30)
    left, year, month, of_month = days, day.year, day.month, day.day
    lines = [f"Start on {day}, go {days} days."]
    while True:
        length = (
            (datetime.date(year + month // 12, month % 12 + 1, 1)) - datetime.date(year, month, 1)
        ).days
        rest = length - of_month
        head = (
            f"{MONTHS[month - 1]} {year} has {length} days, {length} - {of_month} = {rest} remain"
        )
        if left <= rest:
            lines.append(
                f"{head}: enough for {left}, so day {of_month} + {left} = {of_month + left}."
            )
            break
        lines.append(f"{head}: go on with {left} - {rest} = {left - rest}.")
        left -= rest
        year, month, of_month = year + month // 12, month % 12 + 1, 0
    answer = str(day + datetime.timedelta(days=days))
    return Draft({"date": str(day), "days": str(days)}, _final(lines, answer), answer)


def _commas(items) -> str:
    return ", ".join(map(str, items))


FAMILIES: dict[str, tuple[Callable[[random.Random], Draft], ...]] = {
    "arithmetic": (add, subtract, multiply),
    "word": (packs, shopping, sharing, saving),
    "json": (person, order, event),
    "code": (numbers, strings, words),
    "lists": (sort, unique, later),
}
