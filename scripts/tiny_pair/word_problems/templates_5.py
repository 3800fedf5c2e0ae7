"""Word problems of five steps."""

from math import gcd

from tiny_pair.word_problems.draft import Draft, Rng, Template
from tiny_pair.word_problems.words import (
    BAKES,
    BOXES,
    CRAFTS,
    CROPS,
    DREAMS,
    GOODS,
    PACKS,
    PLACES,
    PUPILS,
    SHOPS,
    TOUR_GOALS,
    TOYS,
)


def three_goods_change(r: Rng) -> Draft:
    x, shop = r.person(), r.pick(SHOPS)
    it, other = r.pick_two(GOODS)
    dream = r.pick(DREAMS)
    a, b, c, d = r.between(2, 8), r.between(2, 18), r.between(2, 8), r.between(2, 18)
    e = r.between(20, 120)
    first, second = a * b, c * d
    both = first + second
    total = both + e
    paid = r.banknotes(total)
    return Draft(
        numbers=(a, b, c, d, e, paid),
        questions=(
            f"{x} buys {a} {it} for ${b} each, {c} {other} for ${d} each and {dream.a} for ${e} at "
            f"the {shop}. {x.He} pays with ${paid}. How many dollars does {x} get back?",
            f"At the {shop}, {it.a} costs ${b}, {other.a} costs ${d} and {dream.a} costs ${e}. "
            f"{x} has ${paid} and buys {a} {it}, {c} {other} and one {dream.one}. "
            f"How much money does {x} have left?",
        ),
        lines=(
            f"The {it} cost {a} * {b} = {first} dollars.",
            f"The {other} cost {c} * {d} = {second} dollars.",
            f"Together they cost {first} + {second} = {both} dollars.",
            f"In total {x} pays {both} + {e} = {total} dollars.",
            f"{x} has {paid} - {total} = {paid - total} dollars left.",
        ),
        result=paid - total,
    )


def bake_sale_profit(r: Rng) -> Draft:
    x, it, box, place = r.person(), r.pick(BAKES), r.pick(PACKS), r.pick(PLACES)
    a, b, size, price = r.between(3, 9), r.between(9, 24), r.between(4, 12), r.between(3, 12)
    baked = a * b
    c = r.taken_to_leave(baked, size)
    rest = baked - c
    full = rest // size
    income = price * full
    spent = r.between(2, income - 2)
    return Draft(
        numbers=(a, b, c, size, price, spent),
        questions=(
            f"{x} bakes {a} trays of {b} {it}. {c} of them burn. {x} packs the rest into {box} of "
            f"{size} and sells each {box.one} for ${price} at the {place}. {x.He} paid ${spent} "
            f"for flour and sugar. How many dollars does {x} have left?",
            f"For the {place}, {x} spends ${spent} and bakes {a} trays with {b} {it} on each. "
            f"{x.He} keeps {c} {it}, puts the others into {box} of {size} and sells every "
            f"{box.one} for ${price}. How much money does {x} have left after the costs?",
        ),
        lines=(
            f"{x} bakes {a} * {b} = {baked} {it}.",
            f"There are {baked} - {c} = {rest} {it} left.",
            f"{x} fills {rest} / {size} = {full} {box}.",
            f"{x} gets {price} * {full} = {income} dollars.",
            f"{x} has {income} - {spent} = {income - spent} dollars left.",
        ),
        result=income - spent,
    )


def three_collectors(r: Rng) -> Draft:
    x, y, z = r.three_people()
    it, place = r.pick(TOYS), r.pick(PLACES)
    a, b, k = r.between(2, 25), r.between(2, 14), r.between(2, 6)
    second = a + b
    third = k * second
    both = a + second
    total = both + third
    c = r.between(2, total - 2)
    return Draft(
        numbers=(a, b, k, c),
        questions=(
            f"{x} has {a} {it}. {y} has {b} more {it} than {x}, and {z} has {k} times as many {it} "
            f"as {y}. Together they sell {c} {it} at the {place}. "
            f"How many {it} do they have left?",
            f"At the {place}, {x} finds {a} {it}, {y} finds {b} more than {x}, and {z} finds {k} "
            f"times as many as {y}. They put them together and give away {c} {it}. "
            f"How many {it} are left?",
        ),
        lines=(
            f"{y} has {a} + {b} = {second} {it}.",
            f"{z} has {k} * {second} = {third} {it}.",
            f"Together {x} and {y} have {a} + {second} = {both} {it}.",
            f"Together they have {both} + {third} = {total} {it}.",
            f"There are {total} - {c} = {total - c} {it} left.",
        ),
        result=total - c,
    )


def two_packs_rest_shared(r: Rng) -> Draft:
    x, it, who = r.person(), r.pick(TOYS), r.pick(PUPILS)
    box, other_box = r.pick_two(BOXES)
    a, b, c, d = r.between(2, 8), r.between(4, 15), r.between(2, 8), r.between(4, 15)
    first, second = a * b, c * d
    total = first + second
    n = r.between(3, min(12, total // 2 - 1))
    e = r.taken_to_leave(total, n)
    rest = total - e
    return Draft(
        numbers=(a, b, c, d, e, n),
        questions=(
            f"{x} has {a} {box} with {b} {it} in each and {c} {other_box} with {d} {it} in each. "
            f"{x.He} loses {e} {it} and shares the rest equally among {n} {who}. "
            f"How many {it} does each {who.one} get?",
            f"{x} buys {a} {box} of {b} {it} and {c} {other_box} of {d} {it}. {x.He} keeps {e} "
            f"{it} and gives the others to {n} {who}, the same number to each. "
            f"How many {it} does each {who.one} get?",
        ),
        lines=(
            f"The {box} hold {a} * {b} = {first} {it}.",
            f"The {other_box} hold {c} * {d} = {second} {it}.",
            f"In total {x} has {first} + {second} = {total} {it}.",
            f"There are {total} - {e} = {rest} {it} left.",
            f"Each {who.one} gets {rest} / {n} = {rest // n} {it}.",
        ),
        result=rest // n,
    )


def long_ride(r: Rng) -> Draft:
    x, place = r.person(), r.pick(TOUR_GOALS)
    day, next_day, _ = r.days()
    a, b, c, d = r.between(2, 8), r.between(5, 20), r.between(2, 8), r.between(5, 20)
    first, second = a * b, c * d
    done = first + second
    days, each = r.between(2, 10), r.between(5, 18)
    rest = days * each
    return Draft(
        numbers=(done + rest, a, b, c, d, days),
        questions=(
            f"{x} rides {done + rest} km to {place}. On {day} {x.he} rides {a} hours at "
            f"{b} km an hour, and on {next_day} {c} hours at {d} km an hour. {x.He} rides the rest "
            f"in {days} equal days. How many km is that each day?",
            f"A bike tour to {place} is {done + rest} km long. {x} rides {b} km an hour for {a} "
            f"hours on {day} and {d} km an hour for {c} hours on {next_day}. The rest takes {days} "
            f"days with equal distances. How many km does {x} ride on each of these days?",
        ),
        lines=(
            f"On {day} {x} rides {a} * {b} = {first} km.",
            f"On {next_day} {x} rides {c} * {d} = {second} km.",
            f"In total {x} rides {first} + {second} = {done} km.",
            f"There are {done + rest} - {done} = {rest} km left.",
            f"Each day {x} rides {rest} / {days} = {each} km.",
        ),
        result=each,
    )


def reading_week(r: Rng) -> Draft:
    x, y = r.people()
    day, second_day, third_day = r.days()
    a, b, k, left = r.between(3, 40), r.between(2, 40), r.between(2, 5), r.between(2, 150)
    second, third = a + b, k * a
    both = a + second
    total = both + third
    return Draft(
        numbers=(total + left, a, b, k),
        questions=(
            f"{y} lends {x} a book of {total + left} pages. On {day} {x} reads {a} "
            f"pages, on {second_day} {b} pages more than on {day}, and on {third_day} {k} times as "
            f"many pages as on {day}. How many pages are left?",
            f"On {day} {x} reads {a} pages of a book from {y}. On {second_day} {x.he} "
            f"reads {b} more pages than on {day}, and on {third_day} {k} times as many pages as on "
            f"{day}. The book has {total + left} pages. How many pages are left to read?",
        ),
        lines=(
            f"On {second_day} {x} reads {a} + {b} = {second} pages.",
            f"On {third_day} {x} reads {k} * {a} = {third} pages.",
            f"On {day} and {second_day} {x} reads {a} + {second} = {both} pages.",
            f"In total {x} reads {both} + {third} = {total} pages.",
            f"There are {total + left} - {total} = {left} pages left.",
        ),
        result=left,
    )


def charity_goal(r: Rng) -> Draft:
    x, y = r.people()
    it, place = r.pick(CRAFTS), r.pick(PLACES)
    a, b, price, lacks = r.between(2, 16), r.between(2, 10), r.between(2, 9), r.between(2, 120)
    other = a + b
    first, second = price * a, price * other
    total = first + second
    return Draft(
        numbers=(a, b, price, total + lacks),
        questions=(
            f"{x} sells {a} {it} at the {place}, and {y} sells {b} more {it} than {x}. Each "
            f"{it.one} costs ${price}. Together they want to make ${total + lacks}. "
            f"How many more dollars do they need?",
            f"{x} and {y} want to make ${total + lacks} at the {place}. They sell {it} for "
            f"${price} each. {x} sells {a} {it}, and {y} sells {b} more than {x}. "
            f"How much more money do they need?",
        ),
        lines=(
            f"{y} sells {a} + {b} = {other} {it}.",
            f"{x} gets {price} * {a} = {first} dollars.",
            f"{y} gets {price} * {other} = {second} dollars.",
            f"Together they have {first} + {second} = {total} dollars.",
            f"They need {total + lacks} - {total} = {lacks} more dollars.",
        ),
        result=lacks,
    )


def party_food(r: Rng) -> Draft:
    x, y = r.people()
    it, box = r.pick(BAKES), r.pick(PACKS)
    each, size = r.between(2, 8), r.between(2, 12)
    step = size // gcd(size, each)  # so many people use up whole boxes
    most = min(40, 40 * size // each)
    people = step * r.between((6 + step) // step, most // step)
    b = r.between(2, people // 2)
    a = people - b
    needed = people * each
    full = needed // size
    price = r.between(2, min(12, 430 // full))
    total = price * full
    paid = r.banknotes(total)
    return Draft(
        numbers=(a, b, each, size, price, paid),
        questions=(
            f"{x} invites {a} children and {b} adults to a party. Everybody gets {each} {it}. "
            f"{y} sells {box} of {size} {it} for ${price} each. {x} pays with ${paid}. "
            f"How many dollars does {x} get back?",
            f"{y} sells {it} in {box} of {size} for ${price} each. {x} has ${paid} and "
            f"buys {each} {it} for each of {a} children and {b} adults. "
            f"How much money does {x} have left?",
        ),
        lines=(
            f"In total there are {a} + {b} = {people} people.",
            f"{x} needs {each} * {people} = {needed} {it}.",
            f"{x} buys {needed} / {size} = {full} {box}.",
            f"The {box} cost {price} * {full} = {total} dollars.",
            f"{x} has {paid} - {total} = {paid - total} dollars left.",
        ),
        result=paid - total,
    )


def fruit_stand(r: Rng) -> Draft:
    x, it, box, place = r.person(), r.pick(CROPS), r.pick(PACKS), r.pick(PLACES)
    a, b, size, price = r.between(3, 9), r.between(9, 24), r.between(4, 12), r.between(3, 12)
    picked = a * b
    c = r.taken_to_leave(picked, size)
    rest = picked - c
    full = rest // size
    income = price * full
    spent = r.between(2, income - 2)
    return Draft(
        numbers=(a, b, c, size, price, spent),
        questions=(
            f"{x} picks {b} {it} from each of {a} rows. {c} of them are bad. {x} packs the rest "
            f"into {box} of {size} and sells each {box.one} for ${price}. A stand at the {place} "
            f"costs {x.him} ${spent}. How many dollars does {x} have left?",
            f"{x} pays ${spent} for a stand at the {place}. {x.He} picks {a} rows with {b} {it} in "
            f"each and throws away {c} {it}. The others go into {box} of {size}, and every "
            f"{box.one} sells for ${price}. How much money does {x} have left after the costs?",
        ),
        lines=(
            f"{x} picks {a} * {b} = {picked} {it}.",
            f"There are {picked} - {c} = {rest} {it} left.",
            f"{x} fills {rest} / {size} = {full} {box}.",
            f"{x} gets {price} * {full} = {income} dollars.",
            f"{x} has {income} - {spent} = {income - spent} dollars left.",
        ),
        result=income - spent,
    )


TEMPLATES: tuple[Template, ...] = (
    three_goods_change,
    bake_sale_profit,
    three_collectors,
    two_packs_rest_shared,
    long_ride,
    reading_week,
    charity_goal,
    party_food,
    fruit_stand,
)
