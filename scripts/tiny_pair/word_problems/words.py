"""The words of the word problems: people, things, places and days.

Lists are written as comma-separated strings because they are long and only ever read.  Every
plural is regular except for those in `_IRREGULAR`, so a noun is given by its singular alone.
"""

from typing import NamedTuple

_IRREGULAR = {"loaf": "loaves", "potato": "potatoes", "tomato": "tomatoes", "mango": "mangoes"}


class Noun(NamedTuple):
    """A thing to count; in an f-string it is its plural, as every number here is at least 2."""

    one: str
    many: str

    def __str__(self) -> str:
        return self.many

    @property
    def a(self) -> str:
        """The singular with its article: "a box", "an apple"."""
        return f"{'an' if self.one[0] in 'aeiou' else 'a'} {self.one}"


class Person(NamedTuple):
    """A first name with its pronouns; in an f-string it is the name."""

    name: str
    he: str
    his: str
    him: str

    def __str__(self) -> str:
        return self.name

    @property
    def He(self) -> str:
        return self.he.capitalize()


def _plural(one: str) -> str:
    if one in _IRREGULAR:
        return _IRREGULAR[one]
    if one.endswith(("s", "x", "ch", "sh")):
        return one + "es"
    if one.endswith("y") and one[-2] not in "aeiou":
        return one[:-1] + "ies"
    return one + "s"


def _split(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(","))


def _nouns(text: str) -> tuple[Noun, ...]:
    return tuple(Noun(one, _plural(one)) for one in _split(text))


_SHE = _split(
    "Ada, Alice, Amina, Anna, Bella, Carla, Chloe, Clara, Daisy, Dina, Ella, Emma, Eva, Fatima,"
    "Fiona, Grace, Hana, Helen, Ines, Iris, Jade, Julia, Kate, Lara, Lena, Lily, Lucy, Maria,"
    "Maya, Mia, Nina, Nora, Olga, Olivia, Priya, Rosa, Ruby, Sara, Sofia, Tara, Vera, Zoe"
)
_HE = _split(
    "Adam, Ahmed, Alan, Ben, Boris, Carlos, Dan, David, Diego, Eli, Emil, Felix, Finn, Frank,"
    "George, Hugo, Ian, Ivan, Jack, James, Jonas, Kofi, Leo, Liam, Lucas, Marco, Mark, Max,"
    "Nico, Noah, Omar, Oscar, Paul, Peter, Ravi, Sam, Simon, Theo, Tom, Victor, Will, Yusuf"
)
PEOPLE = tuple(Person(name, "she", "her", "her") for name in _SHE) + tuple(
    Person(name, "he", "his", "him") for name in _HE
)

# Small things that people collect, swap, lose and give away.
TOYS = _nouns(
    "marble, sticker, shell, button, stamp, bead, coin, postcard, badge, trading card, pebble,"
    "key ring, toy car, toy train, toy dinosaur, puzzle piece, block, crayon, pencil, pen,"
    "eraser, feather, acorn, pine cone, magnet, ribbon, bookmark, comic, paper plane, rubber duck,"
    "balloon, token, picture, photo, chestnut, paper star, plastic ring, glass ball, picture card,"
    "bottle cap"
)
BAKES = _nouns(
    "muffin, cookie, cupcake, bun, scone, pie, bagel, roll, tart, pretzel, waffle, pancake,"
    "doughnut, brownie, biscuit, croissant, dumpling, meringue, pastry, ginger snap, cheese stick,"
    "cinnamon roll, oat bar, jam tart, almond cake, fruit slice, loaf"
)
CROPS = _nouns(
    "apple, pear, plum, peach, lemon, orange, mango, cherry, fig, lime, apricot, melon, banana,"
    "carrot, onion, potato, tomato, turnip, radish, pumpkin, cucumber, beet, pepper, cabbage,"
    "olive, walnut, strawberry, mushroom, leek, corn cob, avocado, grapefruit"
)
# Things with a price tag of a few dollars.
GOODS = _nouns(
    "notebook, scarf, cap, mug, candle, plate, lamp, paint brush, poster, kite, ball, puzzle,"
    "towel, bowl, toy robot, board game, umbrella, apron, vase, cushion, wallet, belt, hat,"
    "storybook, rope, bucket, hammer, paint set, calendar, water bottle, lunch box, sketch pad,"
    "jump rope, teddy bear, garden fork, flower pot, picture frame, ruler set, pillow, blanket,"
    "alarm clock, model ship"
)
# Dear things that somebody saves up for.
DREAMS = _nouns(
    "bicycle, guitar, tent, camera, drum kit, telescope, skateboard, scooter, keyboard, microscope,"
    "kayak, desk, winter coat, sewing machine, tablet, wristwatch, violin, printer, armchair,"
    "aquarium, rowing machine, phone, painting, electric fan, trumpet, surfboard"
)
# Containers of small things.
BOXES = _nouns(
    "box, bag, basket, crate, jar, tin, packet, carton, bucket, sack, tub, case, pouch, bowl"
)
# Those that also hold food and bigger things.
PACKS = _nouns("box, bag, basket, crate, tin, packet, carton, case")
# What a hobby maker sells at a stall.
CRAFTS = _nouns(
    "bracelet, necklace, candle, paper lamp, mask, birthday card, clay pot, doll, cushion,"
    "bookmark, wooden spoon, soap bar, woollen hat, birdhouse, fridge magnet,"
    "paper kite, coaster"
)
# What is made with beads.
BEADED = _nouns(
    "bracelet, necklace, anklet, key chain, mobile, lampshade, purse, hair band, hat band, belt"
)
PUPILS = _nouns("child, pupil, guest, player, scout, visitor, student, camper, cousin, neighbor")
PUPILS = (Noun("child", "children"), *PUPILS[1:])
SHOPS = _split(
    "hardware store, farm shop, school shop, corner shop, market stall, village store,"
    "garden center, museum shop, train kiosk, gift shop, craft store, station store, club shop,"
    "camp store, toy shop"
)
PLACES = _split(
    "market, beach, park, school fair, library, youth club, museum, summer camp, village fair,"
    "sports ground, community hall, train station, town square, flea market, street festival"
)
TOUR_GOALS = _split(
    "the coast, a lake, a castle, the mountains, a waterfall, the capital, an old mill, a cave,"
    "a forest, a harbor, the border, a vineyard, the lighthouse, a hot spring, an island"
)
JOBS = _split(
    "mowing lawns, walking dogs, washing cars, picking berries, cleaning windows, painting fences,"
    "raking leaves, babysitting, delivering papers, serving tables, packing boxes, shoveling snow,"
    "watering plants, teaching chess, tutoring, feeding horses, sorting mail, stacking shelves"
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
