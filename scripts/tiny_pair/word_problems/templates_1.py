"""Word problems of one step."""

from tiny_pair.word_problems.draft import Draft, Rng, Template
from tiny_pair.word_problems.words import BOXES, CROPS, GOODS, PLACES, PUPILS, SHOPS, TOYS


def gift(r: Rng) -> Draft:
    x, y = r.people()
    it = r.pick(TOYS)
    a, b = r.between(2, 250), r.between(2, 250)
    return Draft(
        numbers=(a, b),
        questions=(
            f"{x} has {a} {it}. {y} gives {x.him} {b} more {it}. How many {it} does {x} have now?",
            f"{x} owns {a} {it} and gets {b} more from {y}. How many {it} does {x} have?",
            f"{y} gives {b} {it} to {x}, who already has {a} {it}. "
            f"How many {it} does {x} have then?",
        ),
        lines=(f"{x} has {a} + {b} = {a + b} {it}.",),
        result=a + b,
    )


def sold(r: Rng) -> Draft:
    shop, it = r.pick(SHOPS), r.pick(CROPS)
    a, b = r.between(2, 250), r.between(2, 250)
    total = a + b
    return Draft(
        numbers=(total, a),
        questions=(
            f"The {shop} has {total} {it}. It sells {a} of them. How many {it} are left?",
            f"In the morning there are {total} {it} at the {shop}. People buy {a} {it}. "
            f"How many {it} are left?",
            f"The {shop} sells {a} of its {total} {it}. How many {it} are left?",
        ),
        lines=(f"The {shop} has {total} - {a} = {b} {it} left.",),
        result=b,
    )


def packs(r: Rng) -> Draft:
    x, it, box = r.person(), r.pick(TOYS), r.pick(BOXES)
    a, b = r.between(2, 12), r.between(2, 40)
    return Draft(
        numbers=(a, b),
        questions=(
            f"{x} has {a} {box} with {b} {it} in each. How many {it} does {x} have?",
            f"{x} buys {a} {box} of {it}. Each {box.one} holds {b} {it}. "
            f"How many {it} does {x} have in all?",
            f"There are {b} {it} in each of the {a} {box} of {x}. How many {it} does {x} have?",
        ),
        lines=(f"{x} has {a} * {b} = {a * b} {it}.",),
        result=a * b,
    )


def share(r: Rng) -> Draft:
    x, it, who = r.person(), r.pick(TOYS), r.pick(PUPILS)
    n, each = r.between(2, 12), r.between(2, 40)
    total = n * each
    return Draft(
        numbers=(total, n),
        questions=(
            f"{x} shares {total} {it} equally among {n} {who}. "
            f"How many {it} does each {who.one} get?",
            f"{x} has {total} {it} for {n} {who}. Every {who.one} gets the same number. "
            f"How many {it} does each {who.one} get?",
            f"{n} {who} share {total} {it} from {x} equally. How many {it} does each get?",
        ),
        lines=(f"Each {who.one} gets {total} / {n} = {each} {it}.",),
        result=each,
    )


def more_than(r: Rng) -> Draft:
    x, y = r.people()
    it = r.pick(TOYS)
    a, b = r.between(2, 300), r.between(2, 200)
    return Draft(
        numbers=(a, b),
        questions=(
            f"{x} has {a} {it}. {y} has {b} more {it} than {x}. How many {it} does {y} have?",
            f"{y} has {b} {it} more than {x}, and {x} has {a} {it}. How many {it} does {y} have?",
            f"{x} finds {a} {it}. {y} finds {b} more than {x}. How many {it} does {y} have?",
        ),
        lines=(f"{y} has {a} + {b} = {a + b} {it}.",),
        result=a + b,
    )


def difference(r: Rng) -> Draft:
    x, y = r.people()
    it = r.pick(TOYS)
    b, gap = r.between(2, 250), r.between(2, 250)
    a = b + gap
    return Draft(
        numbers=(a, b),
        questions=(
            f"{x} has {a} {it} and {y} has {b} {it}. How many more {it} does {x} have than {y}?",
            f"{x} collects {a} {it}. {y} collects {b} {it}. "
            f"How many more {it} does {x} have than {y}?",
            f"{y} has {b} {it}, while {x} has {a}. How many more {it} does {x} have?",
        ),
        lines=(f"{x} has {a} - {b} = {gap} more {it}.",),
        result=gap,
    )


def cost(r: Rng) -> Draft:
    x, it, shop = r.person(), r.pick(GOODS), r.pick(SHOPS)
    n, price = r.between(2, 12), r.between(2, 40)
    return Draft(
        numbers=(n, price),
        questions=(
            f"{x} buys {n} {it} at the {shop}. Each {it.one} costs ${price}. "
            f"How many dollars does {x} pay?",
            f"At the {shop}, {it.a} costs ${price}. How much do {n} {it} cost {x}?",
            f"{x} needs {n} {it}. The {shop} sells them for ${price} each. "
            f"How much does {x} pay for the {it}?",
        ),
        lines=(f"The {it} cost {n} * {price} = {n * price} dollars.",),
        result=n * price,
    )


def price_each(r: Rng) -> Draft:
    x, it, shop = r.person(), r.pick(GOODS), r.pick(SHOPS)
    n, price = r.between(2, 12), r.between(2, 40)
    total = n * price
    return Draft(
        numbers=(n, total),
        questions=(
            f"{x} pays ${total} for {n} {it} at the {shop}. They all have the same price. "
            f"How many dollars is one {it.one}?",
            f"At the {shop}, {n} equal {it} cost {x} ${total}. How much does each {it.one} cost?",
            f"{x} buys {n} of the same {it.one} for ${total} in all at the {shop}. "
            f"What is the price of {it.a}?",
        ),
        lines=(f"Each {it.one} costs {total} / {n} = {price} dollars.",),
        result=price,
    )


def two_days(r: Rng) -> Draft:
    x, it, place = r.person(), r.pick(TOYS), r.pick(PLACES)
    day, next_day, _ = r.days()
    a, b = r.between(2, 250), r.between(2, 250)
    return Draft(
        numbers=(a, b),
        questions=(
            f"{x} sells {a} {it} at the {place} on {day} and {b} {it} on {next_day}. "
            f"How many {it} does {x} sell in total?",
            f"On {day} {x} sells {a} {it} at the {place}. On {next_day} {x.he} sells another {b}. "
            f"How many {it} does {x} sell in all?",
        ),
        lines=(f"In total {x} sells {a} + {b} = {a + b} {it}.",),
        result=a + b,
    )


def still_needed(r: Rng) -> Draft:
    x, it, who = r.person(), r.pick(TOYS), r.pick(PUPILS)
    has, lacks = r.between(2, 250), r.between(2, 250)
    goal = has + lacks
    return Draft(
        numbers=(goal, has),
        questions=(
            f"{x} needs {goal} {it} for the {who}. {x.He} has {has} {it}. "
            f"How many more {it} does {x} need?",
            f"{x} wants to give the {who} {goal} {it} but has only {has}. "
            f"How many more {it} does {x} need?",
            f"So far {x} has {has} of the {goal} {it} that {x.he} needs for the {who}. "
            f"How many more {it} does {x} need?",
        ),
        lines=(f"{x} needs {goal} - {has} = {lacks} more {it}.",),
        result=lacks,
    )


def seat_rows(r: Rng) -> Draft:
    x, who, place = r.person(), r.pick(PUPILS), r.pick(PLACES)
    a, b = r.between(2, 12), r.between(2, 40)
    return Draft(
        numbers=(a, b),
        questions=(
            f"{x} sets up {a} rows of chairs for the {who} at the {place}. "
            f"Each row has {b} chairs. How many chairs does {x} set up?",
            f"For the {who} at the {place}, {x} makes {a} rows with {b} chairs in each. "
            f"How many chairs are there in all?",
        ),
        lines=(f"{x} sets up {a} * {b} = {a * b} chairs.",),
        result=a * b,
    )


TEMPLATES: tuple[Template, ...] = (
    gift,
    sold,
    packs,
    share,
    more_than,
    difference,
    cost,
    price_each,
    two_days,
    still_needed,
    seat_rows,
)
