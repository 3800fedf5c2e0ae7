"""Word problems of two steps."""

from tiny_pair.word_problems.draft import Draft, Rng, Template
from tiny_pair.word_problems.words import (
    BAKES,
    BOXES,
    DREAMS,
    GOODS,
    JOBS,
    PACKS,
    PLACES,
    PUPILS,
    SHOPS,
    TOUR_GOALS,
    TOYS,
)


def packs_and_loose(r: Rng) -> Draft:
    x, it, box = r.person(), r.pick(TOYS), r.pick(BOXES)
    a, b, c = r.between(2, 12), r.between(2, 30), r.between(2, 60)
    packed = a * b
    return Draft(
        numbers=(a, b, c),
        questions=(
            f"{x} has {a} {box} with {b} {it} in each and {c} loose {it}. "
            f"How many {it} does {x} have in all?",
            f"{x} buys {a} {box} of {it}. Each {box.one} holds {b} {it}. "
            f"Then {x.he} finds {c} more {it}. How many {it} does {x} have now?",
            f"{x} has {c} {it} on a shelf and {a} {box} with {b} {it} in each {box.one}. "
            f"How many {it} does {x} have?",
        ),
        lines=(
            f"The {box} hold {a} * {b} = {packed} {it}.",
            f"{x} has {packed} + {c} = {packed + c} {it}.",
        ),
        result=packed + c,
    )


def packs_used(r: Rng) -> Draft:
    x, it, box = r.person(), r.pick(TOYS), r.pick(BOXES)
    a, b = r.between(2, 12), r.between(4, 30)
    packed = a * b
    c = r.between(2, packed - 2)
    return Draft(
        numbers=(a, b, c),
        questions=(
            f"{x} has {a} {box} with {b} {it} in each. {x.He} loses {c} {it}. "
            f"How many {it} does {x} have left?",
            f"{x} buys {a} {box} of {it}. Each {box.one} holds {b} {it}. "
            f"Then {x} gives away {c} {it}. How many {it} are left?",
            f"There are {b} {it} in each of the {a} {box} that {x} has. {x} uses {c} {it}. "
            f"How many {it} does {x} have left?",
        ),
        lines=(
            f"The {box} hold {a} * {b} = {packed} {it}.",
            f"{x} has {packed} - {c} = {packed - c} {it} left.",
        ),
        result=packed - c,
    )


def change(r: Rng) -> Draft:
    x, it, shop = r.person(), r.pick(GOODS), r.pick(SHOPS)
    n, price = r.between(2, 12), r.between(2, 35)
    total = n * price
    paid = r.banknotes(total)
    return Draft(
        numbers=(n, price, paid),
        questions=(
            f"{x} buys {n} {it} for ${price} each at the {shop}. {x.He} pays with ${paid}. "
            f"How many dollars does {x} get back?",
            f"At the {shop}, {it.a} costs ${price}. {x} has ${paid} and buys {n} {it}. "
            f"How many dollars does {x} have left?",
            f"{x} goes to the {shop} with ${paid} and buys {n} {it}. Each {it.one} is ${price}. "
            f"How much money is left?",
        ),
        lines=(
            f"The {it} cost {n} * {price} = {total} dollars.",
            f"{x} has {paid} - {total} = {paid - total} dollars left.",
        ),
        result=paid - total,
    )


def give_and_find(r: Rng) -> Draft:
    x, y = r.people()
    it, place = r.pick(TOYS), r.pick(PLACES)
    b, left, c = r.between(2, 150), r.between(2, 150), r.between(2, 150)
    a = b + left
    return Draft(
        numbers=(a, b, c),
        questions=(
            f"{x} has {a} {it}. {x.He} gives {b} {it} to {y} and then gets {c} {it} at the "
            f"{place}. How many {it} does {x} have now?",
            f"{x} takes {a} {it} to the {place}. {x.He} gives {y} {b} of them. "
            f"Later {x} buys {c} new {it}. How many {it} does {x} have then?",
            f"At the {place}, {x} has {a} {it} and loses {b} of them. Then {y} gives {x.him} "
            f"{c} {it}. How many {it} does {x} have?",
        ),
        lines=(
            f"{x} has {a} - {b} = {left} {it} left.",
            f"Then {x} has {left} + {c} = {left + c} {it}.",
        ),
        result=left + c,
    )


def more_together(r: Rng) -> Draft:
    x, y = r.people()
    it, place = r.pick(TOYS), r.pick(PLACES)
    a, b = r.between(2, 180), r.between(2, 120)
    other = a + b
    return Draft(
        numbers=(a, b),
        questions=(
            f"{x} has {a} {it}. {y} has {b} more {it} than {x}. "
            f"How many {it} do they have together?",
            f"At the {place}, {x} finds {a} {it}, and {y} finds {b} more than {x}. "
            f"How many {it} do they have together?",
            f"{y} has {b} {it} more than {x}. {x} has {a} {it}. "
            f"How many {it} do {x} and {y} have in all?",
        ),
        lines=(
            f"{y} has {a} + {b} = {other} {it}.",
            f"Together they have {a} + {other} = {a + other} {it}.",
        ),
        result=a + other,
    )


def put_together(r: Rng) -> Draft:
    x, y = r.people()
    it, who = r.pick(TOYS), r.pick(PUPILS)
    n, each = r.between(2, 12), r.between(2, 40)
    total = n * each
    a = r.between(2, total - 2)
    b = total - a
    return Draft(
        numbers=(a, b, n),
        questions=(
            f"{x} has {a} {it} and {y} has {b} {it}. They share all of them equally among "
            f"{n} {who}. How many {it} does each {who.one} get?",
            f"{x} brings {a} {it}, and {y} brings {b}. They put them together and give "
            f"{n} {who} the same number each. How many {it} does each {who.one} get?",
        ),
        lines=(
            f"Together they have {a} + {b} = {total} {it}.",
            f"Each {who.one} gets {total} / {n} = {each} {it}.",
        ),
        result=each,
    )


def eaten_and_boxed(r: Rng) -> Draft:
    x, it, box = r.person(), r.pick(BAKES), r.pick(PACKS)
    size, full, c = r.between(2, 12), r.between(2, 30), r.between(2, 60)
    rest = size * full
    a = rest + c
    return Draft(
        numbers=(a, c, size),
        questions=(
            f"{x} bakes {a} {it}. The family eats {c} of them. {x} packs the rest into {box} "
            f"of {size}. How many {box} does {x} fill?",
            f"Of the {a} {it} that {x} bakes, {c} are eaten at once. The others go into {box} "
            f"with {size} {it} in each. How many {box} does {x} fill?",
        ),
        lines=(
            f"{x} has {a} - {c} = {rest} {it} left.",
            f"{x} fills {rest} / {size} = {full} {box}.",
        ),
        result=full,
    )


def times_together(r: Rng) -> Draft:
    x, y = r.people()
    it, place = r.pick(TOYS), r.pick(PLACES)
    a, k = r.between(2, 40), r.between(2, 11)
    other = k * a
    return Draft(
        numbers=(a, k),
        questions=(
            f"{x} has {a} {it}. {y} has {k} times as many {it} as {x}. "
            f"How many {it} do they have together?",
            f"At the {place}, {x} finds {a} {it}. {y} finds {k} times as many. "
            f"How many {it} do they have together?",
            f"{y} has {k} times as many {it} as {x}, who has {a}. "
            f"How many {it} do they have in all?",
        ),
        lines=(
            f"{y} has {k} * {a} = {other} {it}.",
            f"Together they have {a} + {other} = {a + other} {it}.",
        ),
        result=a + other,
    )


def wages_and_tip(r: Rng) -> Draft:
    x, job, day = r.person(), r.pick(JOBS), r.days()[0]
    h, wage, tip = r.between(2, 12), r.between(5, 35), r.between(2, 60)
    earned = h * wage
    return Draft(
        numbers=(wage, h, tip),
        questions=(
            f"{x} earns ${wage} an hour {job}. On {day} {x.he} works {h} hours and also gets "
            f"${tip} in tips. How many dollars does {x} make?",
            f"On {day} {x} works {h} hours {job}. The pay is ${wage} per hour, and there are "
            f"${tip} in tips. How much money does {x} make?",
        ),
        lines=(
            f"{x} earns {h} * {wage} = {earned} dollars.",
            f"In total {x} has {earned} + {tip} = {earned + tip} dollars.",
        ),
        result=earned + tip,
    )


def weeks_to_save(r: Rng) -> Draft:
    x, it = r.person(), r.pick(DREAMS)
    weekly, weeks, saved = r.between(3, 12), r.between(4, 35), r.between(10, 80)
    missing = weekly * weeks
    price = missing + saved
    return Draft(
        numbers=(price, saved, weekly),
        questions=(
            f"{x} wants {it.a} for ${price}. {x.He} has ${saved} and saves ${weekly} every week. "
            f"How many weeks does {x} need?",
            f"{it.a.capitalize()} costs ${price}. {x} already has ${saved}. If {x.he} saves "
            f"${weekly} each week, in how many weeks can {x} buy it?",
        ),
        lines=(
            f"{x} needs {price} - {saved} = {missing} more dollars.",
            f"{x} needs {missing} / {weekly} = {weeks} weeks.",
        ),
        result=weeks,
    )


def train_ride(r: Rng) -> Draft:
    x, place = r.person(), r.pick(TOUR_GOALS)
    b, left, c = r.between(2, 150), r.between(2, 150), r.between(2, 150)
    a = b + left
    return Draft(
        numbers=(a, b, c),
        questions=(
            f"{x} is on a train to {place} with {a} people. At the next stop, {b} people get off "
            f"and {c} people get on. How many people are on the train now?",
            f"A train to {place} has {a} people on it. {x} sees {b} of them leave. "
            f"Then {c} new people get on. How many people are on the train then?",
        ),
        lines=(
            f"The train has {a} - {b} = {left} people left.",
            f"Then the train has {left} + {c} = {left + c} people.",
        ),
        result=left + c,
    )


def flower_vases(r: Rng) -> Draft:
    x, place = r.person(), r.pick(PLACES)
    n, each = r.between(2, 12), r.between(2, 40)
    total = n * each
    a = r.between(2, total - 2)
    b = total - a
    return Draft(
        numbers=(a, b, n),
        questions=(
            f"{x} picks {a} roses and {b} tulips for the {place}. {x.He} shares the flowers "
            f"equally among {n} vases. How many flowers does each vase get?",
            f"For the {place}, {x} cuts {a} roses and {b} tulips. All of them go into {n} vases, "
            f"the same number in each. How many flowers does each vase get?",
        ),
        lines=(
            f"{x} has {a} + {b} = {total} flowers.",
            f"Each vase gets {total} / {n} = {each} flowers.",
        ),
        result=each,
    )


TEMPLATES: tuple[Template, ...] = (
    packs_and_loose,
    packs_used,
    change,
    give_and_find,
    more_together,
    put_together,
    eaten_and_boxed,
    times_together,
    wages_and_tip,
    weeks_to_save,
    train_ride,
    flower_vases,
)
