"""Questions about a small closed table of countries and animals, alone and compared in pairs."""

import random

from .base import Task, capitalised, with_article

# country: capital, continent, language, currency
COUNTRIES = {
    "France": ("Paris", "Europe", "French", "euro"),
    "Germany": ("Berlin", "Europe", "German", "euro"),
    "Italy": ("Rome", "Europe", "Italian", "euro"),
    "Spain": ("Madrid", "Europe", "Spanish", "euro"),
    "Portugal": ("Lisbon", "Europe", "Portuguese", "euro"),
    "Greece": ("Athens", "Europe", "Greek", "euro"),
    "Austria": ("Vienna", "Europe", "German", "euro"),
    "Norway": ("Oslo", "Europe", "Norwegian", "krone"),
    "Sweden": ("Stockholm", "Europe", "Swedish", "krona"),
    "Denmark": ("Copenhagen", "Europe", "Danish", "krone"),
    "Poland": ("Warsaw", "Europe", "Polish", "zloty"),
    "Hungary": ("Budapest", "Europe", "Hungarian", "forint"),
    "Iceland": ("Reykjavik", "Europe", "Icelandic", "krona"),
    "Japan": ("Tokyo", "Asia", "Japanese", "yen"),
    "China": ("Beijing", "Asia", "Chinese", "yuan"),
    "Thailand": ("Bangkok", "Asia", "Thai", "baht"),
    "Vietnam": ("Hanoi", "Asia", "Vietnamese", "dong"),
    "Egypt": ("Cairo", "Africa", "Arabic", "pound"),
    "Morocco": ("Rabat", "Africa", "Arabic", "dirham"),
    "Ghana": ("Accra", "Africa", "English", "cedi"),
    "Brazil": ("Brasilia", "South America", "Portuguese", "real"),
    "Argentina": ("Buenos Aires", "South America", "Spanish", "peso"),
    "Chile": ("Santiago", "South America", "Spanish", "peso"),
    "Peru": ("Lima", "South America", "Spanish", "sol"),
    "Mexico": ("Mexico City", "North America", "Spanish", "peso"),
    "Cuba": ("Havana", "North America", "Spanish", "peso"),
}
# animal: class, food, home, what it is known for
ANIMALS = {
    "lion": ("mammal", "meat", "the savanna", "its loud roar"),
    "elephant": ("mammal", "grass and leaves", "the savanna", "its long trunk"),
    "giraffe": ("mammal", "leaves", "the savanna", "its long neck"),
    "bat": ("mammal", "insects", "caves", "flying at night"),
    "beaver": ("mammal", "bark and plants", "rivers", "building dams"),
    "whale": ("mammal", "small sea animals", "the ocean", "its huge size"),
    "camel": ("mammal", "dry plants", "the desert", "its hump"),
    "owl": ("bird", "mice", "the forest", "its silent flight"),
    "penguin": ("bird", "fish", "icy places", "being a good swimmer"),
    "woodpecker": ("bird", "insects", "the forest", "drumming on trees"),
    "flamingo": ("bird", "small water animals", "warm lakes", "its pink feathers"),
    "crocodile": ("reptile", "meat", "rivers", "its strong jaws"),
    "turtle": ("reptile", "plants", "the ocean", "its hard shell"),
    "chameleon": ("reptile", "insects", "the rain forest", "changing its colour"),
    "frog": ("amphibian", "insects", "ponds", "its long jumps"),
    "salamander": ("amphibian", "worms", "damp forests", "its smooth skin"),
    "shark": ("fish", "other fish", "the ocean", "its many teeth"),
    "salmon": ("fish", "small water animals", "rivers and seas", "swimming upstream"),
    "bee": ("insect", "nectar", "hives", "making honey"),
    "ant": ("insect", "seeds and small animals", "the ground", "working together"),
}
ASPECTS = ("capital", "continent", "language", "currency")
SENTENCES = (
    "The capital of {country} is {value}.",
    "{country} lies in {value}.",
    "Most people in {country} speak {value}.",
    "In {country} you pay with the {value}.",
)


def make(rng: random.Random) -> Task:
    return rng.choice([_one_country, _two_countries, _two_countries, _two_animals, _two_animals])(rng)


def check(task: Task, text: str) -> bool:
    """Every sentence that states a fact of the reference answer occurs word for word."""
    return all(sentence in text for sentence in task.solution["sentences"])


def _country_sentence(country: str, aspect: int) -> str:
    return SENTENCES[aspect].format(country=country, value=COUNTRIES[country][aspect])


def _one_country(rng: random.Random) -> Task:
    country = rng.choice(list(COUNTRIES))
    aspects = rng.sample(range(4), 3)
    names = [ASPECTS[aspect] for aspect in aspects]
    sentences = [_country_sentence(country, aspect) for aspect in aspects]
    prompt, opening = rng.choice(
        [
            (
                f"Tell me the {names[0]}, the {names[1]} and the {names[2]} of {country}.",
                f"Here is what I know about {country}.",
            ),
            (
                f"I am learning about {country}: what about its {names[0]}, {names[1]} and {names[2]}?",
                f"{country} is a fine choice.",
            ),
        ]
    )
    key = f"country:{country}:{','.join(names)}"
    return Task("facts", key, prompt, f"{opening} {' '.join(sentences)}", {"sentences": sentences})


def _two_countries(rng: random.Random) -> Task:
    first, second = rng.sample(list(COUNTRIES), 2)
    aspect, other = rng.sample(range(4), 2)
    sentences = [
        _country_sentence(country, index) for index in (aspect, other) for country in (first, second)
    ]
    prompt, opening = rng.choice(
        [
            (
                f"Compare {first} and {second}: {ASPECTS[aspect]} and {ASPECTS[other]}.",
                f"Let's compare {first} and {second}.",
            ),
            (
                f"What are the {ASPECTS[aspect]} and the {ASPECTS[other]} of {first} and of {second}?",
                "Let me answer one after the other.",
            ),
        ]
    )
    verdict = _verdict(first, second, other)
    key = f"countries:{first}:{second}:{ASPECTS[aspect]}:{ASPECTS[other]}"
    answer = f"{opening} {' '.join(sentences)}\n\n{verdict}"
    return Task("facts", key, prompt, answer, {"sentences": [*sentences, verdict]})


def _verdict(first: str, second: str, aspect: int) -> str:
    same = COUNTRIES[first][aspect] == COUNTRIES[second][aspect]
    return f"So the {ASPECTS[aspect]} is {'the same' if same else 'not the same'}."


def _two_animals(rng: random.Random) -> Task:
    first, second = rng.sample(list(ANIMALS), 2)
    sentences = []
    for animal in (first, second):
        group, food, home, famous = ANIMALS[animal]
        sentences.append(f"{capitalised(with_article(animal))} is {with_article(group)} and lives in {home}.")
        sentences.append(f"It eats {food} and is known for {famous}.")
    prompt, opening = rng.choice(
        [
            (
                f"What is the difference between {with_article(first)} and {with_article(second)}?",
                "Let's look at both animals.",
            ),
            (
                f"Describe the {first} and the {second} for a child.",
                "With pleasure!",
            ),
        ]
    )
    key = f"animals:{first}:{second}"
    answer = f"{opening} {' '.join(sentences[:2])}\n\n{' '.join(sentences[2:])}"
    return Task("facts", key, prompt, answer, {"sentences": sentences})
