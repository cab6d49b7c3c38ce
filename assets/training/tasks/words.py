"""Small closed vocabularies that several kinds of tasks draw from."""

NAMES = (
    "Mia", "Tom", "Anna", "Leo", "Nora", "Ben", "Clara", "Max", "Ella", "Sam", "Ruth", "Jonas",
    "Ida", "Felix", "Lena", "Oscar", "Maya", "Hugo", "Rosa", "Paul", "Vera", "Finn", "Zoe", "Adam",
)  # fmt: skip
FRIENDS = (
    "Kim", "Omar", "Lucy", "Ivan", "Sofia", "Emil", "Tara", "Noah", "Greta", "Dan", "June", "Arthur",
)  # fmt: skip
THINGS = (
    "apples", "pears", "cards", "marbles", "stamps", "books", "pencils", "shells", "coins", "stickers",
    "buttons", "cookies", "candles", "flowers", "beads", "lemons", "stones", "balloons", "cups", "keys",
)  # fmt: skip
FRUITS = (
    "apple", "banana", "cherry", "grape", "kiwi", "lemon", "mango", "orange", "peach", "plum",
)  # fmt: skip
ANIMALS = (
    "badger", "cat", "deer", "eagle", "fox", "goat", "hedgehog", "lion", "mouse", "owl", "rabbit",
    "squirrel", "tiger", "wolf",
)  # fmt: skip
TOOLS = (
    "axe", "brush", "drill", "hammer", "knife", "ladder", "needle", "pump", "rope", "saw", "wrench",
)  # fmt: skip
COLOURS = (
    "amber", "blue", "crimson", "green", "indigo", "olive", "pink", "red", "silver", "violet", "white",
)  # fmt: skip
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
    "November", "December",
)  # fmt: skip
CITIES = (
    "Rome", "Oslo", "Paris", "Vienna", "Madrid", "Dublin", "Athens", "Prague", "Lisbon", "Berlin",
    "London", "Warsaw", "Helsinki", "Cairo", "Tokyo", "Lima",
)  # fmt: skip
JOBS = (
    "baker", "doctor", "teacher", "pilot", "painter", "nurse", "gardener", "engineer", "writer",
    "farmer", "singer", "carpenter",
)  # fmt: skip
NUMBER_WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
)  # fmt: skip
