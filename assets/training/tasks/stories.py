"""Short stories: the prompt gives hero, name, object and place; the rest is free and varies."""

import random
import re

from .base import Task, with_article

HEROES = (
    "fox", "bear", "rabbit", "owl", "mouse", "cat", "hedgehog", "duck", "frog", "turtle", "dragon", "robot",
    "squirrel", "goat", "wizard", "knight",
)  # fmt: skip
HERO_NAMES = (
    "Pip",
    "Bruno",
    "Luna",
    "Toby",
    "Misty",
    "Otto",
    "Daisy",
    "Rufus",
    "Wanda",
    "Milo",
    "Poppy",
    "Gus",
)
OBJECTS = (
    "lantern", "key", "golden acorn", "red scarf", "old map", "silver bell", "blue kite", "music box",
    "compass", "teapot", "feather", "book", "crown", "umbrella",
)  # fmt: skip
PLACES = {
    "forest": "in the forest", "village": "in the village", "harbour": "at the harbour",
    "mountains": "in the mountains", "castle": "in the castle", "garden": "in the garden",
    "lighthouse": "by the lighthouse", "old mill": "by the old mill", "river": "by the river",
    "library": "in the library",
}  # fmt: skip
HELPERS = ("crow", "mole", "badger", "snail", "heron", "beetle", "swan", "donkey")
TIMES = ("One rainy morning", "One quiet evening", "On a windy day", "One bright morning", "Late one night")
SPOTS = (
    "under a mossy stone", "behind an old door", "between two tall trees", "inside a hollow log",
    "on top of a wooden gate", "next to a small well",
)  # fmt: skip


def make(rng: random.Random) -> Task:
    hero, name = rng.choice(HEROES), rng.choice(HERO_NAMES)
    item, place = rng.choice(OBJECTS), rng.choice(list(PLACES))
    plot = rng.choice(list(PLOTS))
    wish, body, ending = PLOTS[plot]
    helper = rng.choice(HELPERS)
    slots = {
        "hero": hero,
        "name": name,
        "item": item,
        "place": PLACES[place],
        "time": rng.choice(TIMES),
        "helper": helper,
        "spot": rng.choice(SPOTS),
        "a_hero": with_article(hero),
        "an_item": with_article(item),
        "a_helper": with_article(helper),
    }
    opening, prompt = rng.choice(
        [
            ("Once upon a time", "Tell me a short story about {a_hero} named {name} who {wish} {place}."),
            ("Not long ago", "Write a little story: {a_hero} called {name} {wish} {place}."),
            ("Many years ago", "I would like a bedtime story about {name} the {hero}, who {wish} {place}."),
        ]
    )
    prompt = prompt.replace("{wish}", wish)  # first, because the wish holds slots of its own
    answer = f"{opening} there was {{a_hero}} named {{name}} who lived {{place}}. {body}\n\n{ending}"
    key = f"{plot}:{hero}:{name}:{item}:{place}"
    endings = [ending.format(**(slots | {"helper": other})) for other in HELPERS]
    solution = {"must_name": [name, hero, item, PLACES[place]], "endings": endings}
    return Task("stories", key, prompt.format(**slots), answer.format(**slots), solution)


def check(task: Task, text: str) -> bool:
    """Everything the prompt asked for occurs, the plot's own ending closes it, one helper acts."""
    helpers = [helper for helper in HELPERS if re.search(rf"\b{helper}\b", text)]
    return (
        all(word in text for word in task.solution["must_name"])
        and text.strip().endswith(tuple(task.solution["endings"]))
        and len(helpers) <= 1
    )


PLOTS = {
    "lost": (
        "has lost {an_item}",
        "{time}, {name} noticed that the {item} was gone. {name} looked everywhere and asked everyone."
        ' At last {a_helper} said: "I saw something shine {spot}." {name} ran there at once, and there'
        " it was.",
        "{name} thanked the {helper}, and from that day on the {item} never got lost again.",
    ),
    "shares": (
        "finds {an_item}",
        "{time}, {name} found {an_item} {spot}. It was the most beautiful thing {name} had ever seen."
        " Just then {a_helper} came by and looked very sad. {name} thought for a moment and said:"
        ' "Let us share it."',
        "The {helper} smiled, and the two of them became best friends because of the {item}.",
    ),
    "repairs": (
        "wants to repair {an_item}",
        "{time}, the {item} broke, and nobody knew what to do. {name} tried once, and it did not work."
        ' {name} tried again, and it still did not work. "Be patient," said {a_helper} who had been'
        " watching {spot}. So {name} tried a third time, very slowly.",
        "And look, the {item} was as good as new, and {name} was the proudest {hero} of all.",
    ),
    "brings": (
        "brings a friend {an_item}",
        "{time}, {name} wrapped up the {item} and set out to visit {a_helper}. The way was long, and"
        " {name} had to rest {spot}. When the stars came out, {name} finally knocked at the door."
        ' "What a surprise!" said the {helper}.',
        "They drank tea together, and the {item} found a place of honour next to the window.",
    ),
}
