"""Word problems of four steps."""

from tiny_pair.word_problems.draft import Draft, Rng, Template
from tiny_pair.word_problems.words import (
    BAKES,
    CRAFTS,
    CROPS,
    DREAMS,
    GOODS,
    JOBS,
    PACKS,
    PLACES,
    PUPILS,
    SHOPS,
    TOYS,
)


def two_goods_change(r: Rng) -> Draft:
    x, shop = r.person(), r.pick(SHOPS)
    it, other = r.pick_two(GOODS)
    a, b, c, d = r.between(2, 10), r.between(2, 20), r.between(2, 10), r.between(2, 20)
    first, second = a * b, c * d
    total = first + second
    paid = r.banknotes(total)
    return Draft(
        numbers=(a, b, c, d, paid),
        questions=(
            f"{x} buys {a} {it} for ${b} each and {c} {other} for ${d} each at the {shop}. "
            f"{x.He} pays with ${paid}. How many dollars does {x} get back?",
            f"At the {shop}, {it.a} costs ${b} and {other.a} costs ${d}. {x} has ${paid} and buys "
            f"{a} {it} and {c} {other}. How much money does {x} have left?",
            f"{x} takes ${paid} to the {shop}. {x.He} buys {a} {it} at ${b} each and {c} {other} "
            f"at ${d} each. How many dollars are left?",
        ),
        lines=(
            f"The {it} cost {a} * {b} = {first} dollars.",
            f"The {other} cost {c} * {d} = {second} dollars.",
            f"In total {x} pays {first} + {second} = {total} dollars.",
            f"{x} has {paid} - {total} = {paid - total} dollars left.",
        ),
        result=paid - total,
    )


def three_days(r: Rng) -> Draft:
    x, it, place = r.person(), r.pick(CROPS), r.pick(PLACES)
    day, second_day, third_day = r.days()
    a, b = r.between(5, 90), r.between(2, 60)
    second = a + b
    c = r.between(2, second - 2)
    third = second - c
    return Draft(
        numbers=(a, b, c),
        questions=(
            f"{x} sells {it} at the {place}. On {day} {x.he} sells {a}, on {second_day} {b} more "
            f"than on {day}, and on {third_day} {c} fewer than on {second_day}. "
            f"How many {it} does {x} sell in the three days?",
            f"On {day} {x} sells {a} {it} at the {place}. On {second_day} {x.he} sells {b} more "
            f"than on {day}. On {third_day} {x.he} sells {c} fewer than on {second_day}. "
            f"How many {it} does {x} sell in all?",
        ),
        lines=(
            f"On {second_day} {x} sells {a} + {b} = {second} {it}.",
            f"On {third_day} {x} sells {second} - {c} = {third} {it}.",
            f"On {day} and {second_day} {x} sells {a} + {second} = {a + second} {it}.",
            f"In total {x} sells {a + second} + {third} = {a + second + third} {it}.",
        ),
        result=a + second + third,
    )


def bake_sale(r: Rng) -> Draft:
    x, it, box, place = r.person(), r.pick(BAKES), r.pick(PACKS), r.pick(PLACES)
    a, b, size, price = r.between(3, 9), r.between(9, 24), r.between(4, 12), r.between(2, 12)
    baked = a * b
    c = r.taken_to_leave(baked, size)
    rest = baked - c
    full = rest // size
    return Draft(
        numbers=(a, b, c, size, price),
        questions=(
            f"{x} bakes {a} trays of {b} {it}. {c} of them burn. {x} packs the rest into {box} of "
            f"{size} and sells each {box.one} for ${price} at the {place}. "
            f"How many dollars does {x} get?",
            f"For the {place}, {x} bakes {a} trays with {b} {it} on each. {x.He} keeps {c} {it} "
            f"and puts the others into {box}, {size} in each. Every {box.one} sells for ${price}. "
            f"How much money does {x} get?",
        ),
        lines=(
            f"{x} bakes {a} * {b} = {baked} {it}.",
            f"There are {baked} - {c} = {rest} {it} left.",
            f"{x} fills {rest} / {size} = {full} {box}.",
            f"{x} gets {price} * {full} = {price * full} dollars.",
        ),
        result=price * full,
    )


def two_work_days(r: Rng) -> Draft:
    x, job, it = r.person(), r.pick(JOBS), r.pick(DREAMS)
    day, next_day, _ = r.days()
    a, b, wage = r.between(2, 7), r.between(2, 5), r.between(5, 12)
    second = a + b
    hours = a + second
    earned = hours * wage
    spent = r.between(earned // 4, earned - 2)
    return Draft(
        numbers=(a, b, wage, spent),
        questions=(
            f"{x} works {a} hours on {day} and {b} hours more than that on {next_day}, {job} for "
            f"${wage} an hour. Then {x.he} buys {it.a} for ${spent}. "
            f"How many dollars does {x} have left?",
            f"On {day} {x} spends {a} hours {job}. On {next_day} {x.he} works {b} hours more than "
            f"on {day}. The pay is ${wage} per hour. {x} buys {it.a} for ${spent}. "
            f"How much money does {x} have left?",
        ),
        lines=(
            f"On {next_day} {x} works {a} + {b} = {second} hours.",
            f"In total {x} works {a} + {second} = {hours} hours.",
            f"{x} earns {wage} * {hours} = {earned} dollars.",
            f"{x} has {earned} - {spent} = {earned - spent} dollars left.",
        ),
        result=earned - spent,
    )


def times_and_split(r: Rng) -> Draft:
    x, y = r.people()
    it, who = r.pick(TOYS), r.pick(PUPILS)
    a, k, n = r.between(8, 30), r.between(2, 6), r.between(3, 10)
    other = k * a
    total = a + other
    c = r.taken_to_leave(total, n)
    rest = total - c
    return Draft(
        numbers=(a, k, c, n),
        questions=(
            f"{x} has {a} {it}. {y} has {k} times as many {it} as {x}. They put them together, "
            f"lose {c} of them and share the rest equally among {n} {who}. "
            f"How many {it} does each {who.one} get?",
            f"{y} has {k} times as many {it} as {x}, who has {a}. Together they keep {c} {it} and "
            f"give the others to {n} {who}, the same number to each. "
            f"How many {it} does each {who.one} get?",
        ),
        lines=(
            f"{y} has {k} * {a} = {other} {it}.",
            f"Together they have {a} + {other} = {total} {it}.",
            f"There are {total} - {c} = {rest} {it} left.",
            f"Each {who.one} gets {rest} / {n} = {rest // n} {it}.",
        ),
        result=rest // n,
    )


def class_trip(r: Rng) -> Draft:
    x, place = r.person(), r.pick(PLACES)
    a, seats, price = r.between(2, 9), r.between(5, 12), r.between(4, 12)
    b = r.between(8, min(30, 40 * (seats - 1) // a))  # at most 40 vans
    pupils = a * b
    adults = r.added_to_split(pupils, seats, 30)
    people = pupils + adults
    vans = people // seats
    return Draft(
        numbers=(a, b, adults, seats, price),
        questions=(
            f"{x} plans a trip to the {place} for {a} classes of {b} children and {adults} adults. "
            f"They go in vans with {seats} seats. All seats are taken, and each van costs "
            f"${price}. How many dollars do the vans cost?",
            f"{a} classes with {b} children each and {adults} adults go to the {place}. {x} rents "
            f"vans for ${price} each. Every van takes {seats} people and is full. "
            f"How much does {x} pay for the vans?",
        ),
        lines=(
            f"There are {a} * {b} = {pupils} children.",
            f"In total there are {pupils} + {adults} = {people} people.",
            f"They fill {people} / {seats} = {vans} vans.",
            f"The vans cost {price} * {vans} = {price * vans} dollars.",
        ),
        result=price * vans,
    )


def two_pickers(r: Rng) -> Draft:
    x, y = r.people()
    it, place = r.pick(CROPS), r.pick(PLACES)
    hours, a, b = r.between(2, 9), r.between(3, 25), r.between(3, 25)
    first, second = hours * a, hours * b
    total = first + second
    c = r.between(2, total - 2)
    return Draft(
        numbers=(a, b, hours, c),
        questions=(
            f"{x} picks {a} {it} an hour and {y} picks {b} {it} an hour. After {hours} hours they "
            f"sell {c} {it} at the {place}. How many {it} do they have left?",
            f"In one hour {x} picks {a} {it} and {y} picks {b}. They both work {hours} hours. Then "
            f"they bring {c} {it} to the {place}. How many {it} are left?",
        ),
        lines=(
            f"{x} picks {hours} * {a} = {first} {it}.",
            f"{y} picks {hours} * {b} = {second} {it}.",
            f"Together they have {first} + {second} = {total} {it}.",
            f"There are {total} - {c} = {total - c} {it} left.",
        ),
        result=total - c,
    )


def savings_split(r: Rng) -> Draft:
    x, it, who = r.person(), r.pick(DREAMS), r.pick(PUPILS)
    weekly, weeks, n = r.between(5, 25), r.between(4, 12), r.between(3, 8)
    gift = r.between(5, 60)
    saved = weekly * weeks
    total = saved + gift
    spent = r.taken_to_leave(total, n)
    rest = total - spent
    return Draft(
        numbers=(weekly, weeks, gift, spent, n),
        questions=(
            f"{x} saves ${weekly} a week for {weeks} weeks and gets ${gift} as a gift. {x.He} buys "
            f"{it.a} for ${spent} and shares the rest equally among {n} {who}. "
            f"How many dollars does each {who.one} get?",
            f"For {weeks} weeks {x} saves ${weekly} every week. {x.He} also gets ${gift} as a "
            f"gift. First {x} buys {it.a} for ${spent}. Then {n} {who} get equal parts of the "
            f"rest. How much does each {who.one} get?",
        ),
        lines=(
            f"{x} saves {weeks} * {weekly} = {saved} dollars.",
            f"In total {x} has {saved} + {gift} = {total} dollars.",
            f"{x} has {total} - {spent} = {rest} dollars left.",
            f"Each {who.one} gets {rest} / {n} = {rest // n} dollars.",
        ),
        result=rest // n,
    )


def craft_boxes(r: Rng) -> Draft:
    x, it, box, place = r.person(), r.pick(CRAFTS), r.pick(PACKS), r.pick(PLACES)
    a, b, size, price = r.between(3, 9), r.between(9, 24), r.between(4, 12), r.between(2, 12)
    made = a * b
    c = r.taken_to_leave(made, size)
    rest = made - c
    full = rest // size
    return Draft(
        numbers=(a, b, c, size, price),
        questions=(
            f"{x} makes {b} {it} a day for {a} days. {x.He} gives away {c} {it} and packs the rest "
            f"into {box} of {size}. At the {place} each {box.one} sells for ${price}. "
            f"How many dollars does {x} get?",
            f"For {a} days {x} makes {b} {it} every day. {c} of them break. {x} puts the others "
            f"into {box} with {size} in each and sells every {box.one} for ${price} at the "
            f"{place}. How much money does {x} get?",
        ),
        lines=(
            f"{x} makes {a} * {b} = {made} {it}.",
            f"There are {made} - {c} = {rest} {it} left.",
            f"{x} fills {rest} / {size} = {full} {box}.",
            f"{x} gets {price} * {full} = {price * full} dollars.",
        ),
        result=price * full,
    )


def family_outing(r: Rng) -> Draft:
    x, place = r.person(), r.pick(PLACES)
    a, b, c, d = r.between(2, 10), r.between(2, 20), r.between(2, 10), r.between(2, 20)
    first, second = a * b, c * d
    total = first + second
    paid = r.banknotes(total)
    return Draft(
        numbers=(a, b, c, d, paid),
        questions=(
            f"{x} takes {a} adults and {c} children to the {place}. A ticket is ${b} for an adult "
            f"and ${d} for a child. {x} pays with ${paid}. How many dollars does {x} get back?",
            f"Adults pay ${b} and children pay ${d} at the {place}. {x} has ${paid} and buys "
            f"tickets for {a} adults and {c} children. How much money does {x} have left?",
        ),
        lines=(
            f"The tickets for adults cost {a} * {b} = {first} dollars.",
            f"The tickets for children cost {c} * {d} = {second} dollars.",
            f"In total {x} pays {first} + {second} = {total} dollars.",
            f"{x} has {paid} - {total} = {paid - total} dollars left.",
        ),
        result=paid - total,
    )


TEMPLATES: tuple[Template, ...] = (
    two_goods_change,
    three_days,
    bake_sale,
    two_work_days,
    times_and_split,
    class_trip,
    two_pickers,
    savings_split,
    craft_boxes,
    family_outing,
)
