"""Word problems of three steps."""

from tiny_pair.word_problems.draft import Draft, Rng, Template
from tiny_pair.word_problems.words import (
    BAKES,
    BEADED,
    BOXES,
    CRAFTS,
    CROPS,
    DREAMS,
    GOODS,
    JOBS,
    PLACES,
    PUPILS,
    SHOPS,
    TOYS,
)


def two_goods(r: Rng) -> Draft:
    x, shop = r.person(), r.pick(SHOPS)
    it, other = r.pick_two(GOODS)
    a, b, c, d = r.between(2, 12), r.between(2, 20), r.between(2, 12), r.between(2, 20)
    first, second = a * b, c * d
    return Draft(
        numbers=(a, b, c, d),
        questions=(
            f"{x} buys {a} {it} for ${b} each and {c} {other} for ${d} each at the {shop}. "
            f"How many dollars does {x} pay in total?",
            f"At the {shop}, {it.a} costs ${b} and {other.a} costs ${d}. {x} buys {a} {it} and "
            f"{c} {other}. How much does {x} pay in all?",
        ),
        lines=(
            f"The {it} cost {a} * {b} = {first} dollars.",
            f"The {other} cost {c} * {d} = {second} dollars.",
            f"In total {x} pays {first} + {second} = {first + second} dollars.",
        ),
        result=first + second,
    )


def trays_shared(r: Rng) -> Draft:
    x, it, who = r.person(), r.pick(BAKES), r.pick(PUPILS)
    a, b, n = r.between(3, 9), r.between(9, 24), r.between(4, 12)
    baked = a * b
    c = r.taken_to_leave(baked, n)
    rest = baked - c
    return Draft(
        numbers=(a, b, c, n),
        questions=(
            f"{x} bakes {a} trays of {b} {it}. {c} of them burn. {x} shares the rest equally "
            f"among {n} {who}. How many {it} does each {who.one} get?",
            f"{x} bakes {a} trays with {b} {it} on each and keeps {c} {it}. The others are for "
            f"{n} {who}, the same number for each. How many {it} does each {who.one} get?",
        ),
        lines=(
            f"{x} bakes {a} * {b} = {baked} {it}.",
            f"There are {baked} - {c} = {rest} {it} left.",
            f"Each {who.one} gets {rest} / {n} = {rest // n} {it}.",
        ),
        result=rest // n,
    )


def book_pages(r: Rng) -> Draft:
    x, y = r.people()
    day, next_day, _ = r.days()
    a, b, left = r.between(5, 120), r.between(2, 60), r.between(2, 180)
    second = a + b
    read = a + second
    return Draft(
        numbers=(read + left, a, b),
        questions=(
            f"{y} lends {x} a book of {read + left} pages. On {day} {x} reads {a} "
            f"pages, and on {next_day} {b} pages more than on {day}. "
            f"How many pages are left?",
            f"On {day} {x} reads {a} pages of a book from {y}. On {next_day} {x.he} reads "
            f"{b} more pages than on {day}. The book has {read + left} pages. "
            f"How many pages are left to read?",
        ),
        lines=(
            f"On {next_day} {x} reads {a} + {b} = {second} pages.",
            f"In total {x} reads {a} + {second} = {read} pages.",
            f"There are {read + left} - {read} = {left} pages left.",
        ),
        result=left,
    )


def wages_and_purchase(r: Rng) -> Draft:
    x, job, it = r.person(), r.pick(JOBS), r.pick(DREAMS)
    h, wage, saved = r.between(3, 12), r.between(8, 30), r.between(5, 120)
    earned = h * wage
    total = earned + saved
    price = r.between(earned // 2, total - 2)
    return Draft(
        numbers=(saved, h, wage, price),
        questions=(
            f"{x} has ${saved}. Then {x.he} works {h} hours {job} for ${wage} an hour. {x.He} "
            f"buys {it.a} for ${price}. How many dollars does {x} have left?",
            f"{x} earns ${wage} per hour {job} and works {h} hours. {x.He} also has ${saved} from "
            f"before. After buying {it.a} for ${price}, how much money does {x} have left?",
        ),
        lines=(
            f"{x} earns {h} * {wage} = {earned} dollars.",
            f"In total {x} has {earned} + {saved} = {total} dollars.",
            f"{x} has {total} - {price} = {total - price} dollars left.",
        ),
        result=total - price,
    )


def times_then_more(r: Rng) -> Draft:
    x, y, z = r.three_people()
    it = r.pick(TOYS)
    a, k, b = r.between(2, 30), r.between(2, 9), r.between(2, 80)
    second = k * a
    third = second + b
    return Draft(
        numbers=(a, k, b),
        questions=(
            f"{x} has {a} {it}. {y} has {k} times as many {it} as {x}, and {z} has {b} more than "
            f"{y}. How many {it} do {x} and {z} have together?",
            f"{y} has {k} times as many {it} as {x}. {z} has {b} more {it} than {y}. {x} has {a} "
            f"{it}. How many {it} do {x} and {z} have in all?",
        ),
        lines=(
            f"{y} has {k} * {a} = {second} {it}.",
            f"{z} has {second} + {b} = {third} {it}.",
            f"Together {x} and {z} have {a} + {third} = {a + third} {it}.",
        ),
        result=a + third,
    )


def split_the_bill(r: Rng) -> Draft:
    x, it, who = r.person(), r.pick(GOODS), r.pick(PUPILS)
    a, b, n = r.between(2, 12), r.between(3, 30), r.between(2, 10)
    goods = a * b
    fee = r.added_to_split(goods, n, 40)
    total = goods + fee
    return Draft(
        numbers=(a, b, fee, n),
        questions=(
            f"{x} orders {a} {it} at ${b} each. The delivery costs ${fee}. {n} {who} share the "
            f"cost equally. How many dollars does each {who.one} pay?",
            f"{n} {who} buy {a} {it} from {x} for ${b} each and pay ${fee} for delivery. They "
            f"split the cost equally. How much does each {who.one} pay?",
        ),
        lines=(
            f"The {it} cost {a} * {b} = {goods} dollars.",
            f"In total they pay {goods} + {fee} = {total} dollars.",
            f"Each {who.one} pays {total} / {n} = {total // n} dollars.",
        ),
        result=total // n,
    )


def workshop(r: Rng) -> Draft:
    x, it, place = r.person(), r.pick(CRAFTS), r.pick(PLACES)
    people, days = r.between(2, 12), r.between(2, 12)
    each = r.between(2, 40 // people)
    daily = people * each
    total = daily * days
    c = r.between(2, total - 2)
    return Draft(
        numbers=(people, each, days, c),
        questions=(
            f"{x} runs a workshop with {people} workers. Each worker makes {each} {it} a day. "
            f"After {days} days, {c} {it} are sold at the {place}. How many {it} are left?",
            f"Every day, each of the {people} workers of {x} makes {each} {it}. {x} collects the "
            f"{it} for {days} days and sells {c} of them at the {place}. "
            f"How many {it} are left?",
        ),
        lines=(
            f"The workers make {people} * {each} = {daily} {it} a day.",
            f"In {days} days they make {days} * {daily} = {total} {it}.",
            f"{x} has {total} - {c} = {total - c} {it} left.",
        ),
        result=total - c,
    )


def gifts_to_many(r: Rng) -> Draft:
    x, it, who, place = r.person(), r.pick(TOYS), r.pick(PUPILS), r.pick(PLACES)
    n, each, c = r.between(2, 12), r.between(2, 25), r.between(2, 90)
    given = n * each
    left = r.between(2, 110)
    a = given + left
    return Draft(
        numbers=(a, each, n, c),
        questions=(
            f"{x} has {a} {it}. {x.He} gives {each} {it} to each of {n} {who}. Then {x.he} finds "
            f"{c} {it} at the {place}. How many {it} does {x} have now?",
            f"At the {place}, {n} {who} get {each} {it} each from {x}, who had {a} {it}. Later "
            f"{x} buys {c} new {it}. How many {it} does {x} have then?",
        ),
        lines=(
            f"{x} gives away {n} * {each} = {given} {it}.",
            f"{x} has {a} - {given} = {left} {it} left.",
            f"Then {x} has {left} + {c} = {left + c} {it}.",
        ),
        result=left + c,
    )


def library_shelves(r: Rng) -> Draft:
    x, day = r.person(), r.days()[0]
    a, b, d = r.between(2, 12), r.between(8, 35), r.between(2, 60)
    total = a * b
    c = r.between(2, total - 2)
    left = total - c
    return Draft(
        numbers=(a, b, c, d),
        questions=(
            f"{x} looks after {a} shelves with {b} books on each. On {day} people borrow {c} books "
            f"and bring back {d} others. How many books are on the shelves now?",
            f"A library has {a} shelves of {b} books. On {day} {x} sees that {c} books are lent "
            f"and {d} other books come back. How many books are on the shelves then?",
        ),
        lines=(
            f"The shelves hold {a} * {b} = {total} books.",
            f"There are {total} - {c} = {left} books left.",
            f"Then there are {left} + {d} = {left + d} books.",
        ),
        result=left + d,
    )


def still_short(r: Rng) -> Draft:
    x, dream, it = r.person(), r.pick(DREAMS), r.pick(GOODS)
    weekly, weeks, lacks = r.between(4, 30), r.between(3, 12), r.between(2, 140)
    saved = weekly * weeks
    spent = r.between(2, min(40, saved - 2))
    left = saved - spent
    return Draft(
        numbers=(weekly, weeks, spent, left + lacks),
        questions=(
            f"{x} saves ${weekly} a week for {weeks} weeks. Then {x.he} buys {it.a} for ${spent}. "
            f"{x.He} wants {dream.a} for ${left + lacks}. How many more dollars does {x} need?",
            f"{dream.a.capitalize()} costs ${left + lacks}. {x} saves ${weekly} every week for "
            f"{weeks} weeks but spends ${spent} on {it.a}. How much more money does {x} need?",
        ),
        lines=(
            f"{x} saves {weeks} * {weekly} = {saved} dollars.",
            f"{x} has {saved} - {spent} = {left} dollars left.",
            f"{x} needs {left + lacks} - {left} = {lacks} more dollars.",
        ),
        result=lacks,
    )


def garden_rows(r: Rng) -> Draft:
    x, place = r.person(), r.pick(PLACES)
    it, other = r.pick_two(CROPS)
    a, b, c, d = r.between(2, 12), r.between(2, 20), r.between(2, 12), r.between(2, 20)
    first, second = a * b, c * d
    return Draft(
        numbers=(a, b, c, d),
        questions=(
            f"{x} grows {a} rows of {b} {it} and {c} rows of {d} {other} near the {place}. "
            f"How many plants does {x} grow in total?",
            f"Near the {place}, {x} plants {a} rows with {b} {it} in each and {c} rows with {d} "
            f"{other} in each. How many plants does {x} have in all?",
        ),
        lines=(
            f"There are {a} * {b} = {first} {it}.",
            f"There are {c} * {d} = {second} {other}.",
            f"In total {x} has {first} + {second} = {first + second} plants.",
        ),
        result=first + second,
    )


def bead_crafts(r: Rng) -> Draft:
    x, craft, box = r.person(), r.pick(BEADED), r.pick(BOXES)
    a, b, size = r.between(3, 9), r.between(9, 24), r.between(4, 12)
    beads = a * b
    c = r.taken_to_leave(beads, size)
    rest = beads - c
    return Draft(
        numbers=(a, b, c, size),
        questions=(
            f"{x} has {a} {box} of {b} beads. {x.He} loses {c} beads. {x} uses the rest to make "
            f"{craft} with {size} beads on each. How many {craft} does {x} make?",
            f"{x} buys {a} {box} with {b} beads in each and gives away {c} beads. Each "
            f"{craft.one} needs {size} beads. How many {craft} can {x} make?",
        ),
        lines=(
            f"The {box} hold {a} * {b} = {beads} beads.",
            f"{x} has {beads} - {c} = {rest} beads left.",
            f"{x} makes {rest} / {size} = {rest // size} {craft}.",
        ),
        result=rest // size,
    )


TEMPLATES: tuple[Template, ...] = (
    two_goods,
    trays_shared,
    book_pages,
    wages_and_purchase,
    times_then_more,
    split_the_bill,
    workshop,
    gifts_to_many,
    library_shelves,
    still_short,
    garden_rows,
    bead_crafts,
)
