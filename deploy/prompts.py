"""What the demo asks. Real questions for a small model: short ones, one with history, one long enough to be prefilled
in several chunks."""

from dataclasses import dataclass

Message = dict[str, str]

PASSAGE = """\
The ferry between the two towns is older than either of their bridges, because neither of them ever had one. The
strait is only four kilometres wide, but the tide runs through it like a river that changes its mind twice a day, and
the bed is a long slope of soft clay in which no pier would stand. So people cross by boat. In the days of sail the
crossing was a matter of patience: the skipper waited for slack water, set out a little before it, and let the last of
the ebb carry him past the rocks that are called the Three Clerks, because they stand in a row and have never been
known to help anybody. If he was late, the flood took him up the inlet instead, and the passengers spent the night in
the salt sheds.

The steam ferry came in the year of the great herring. It was bought second-hand from a harbour in the south and
arrived with its old name painted over so thinly that it could still be read in low sun. It burned a tonne of coal a
day, and it did not wait for slack water. For the first time there was a timetable. The teacher on the north side
copied it out by hand, forty times, and every household that had a child in the school on the other side nailed a copy
to the door. What the timetable changed was not the crossing but everything around it: the market moved from Saturday
to Wednesday, because the boat made two trips on Wednesdays; the bakery on the south side began to bake for both
towns; and the doctor, who had kept a room on each side of the water, gave one of them up.

The work of the crew was divided in a way that visitors found odd. One man loaded and another unloaded, and they were
never the same. The loader knew the weight of everything. He could look at a cart and say on which side of the deck it
had to stand, and he filled the boat from the middle outwards so that it never leaned. The unloader knew the order of
everything. He knew who had to catch the train and whose fish would spoil, and he had the ropes off before the boat
touched the quay. When the loader was ill, once, the unloader did both, and the boat left twenty minutes late and came
in with all the carts facing the wrong way. After that nobody suggested again that one man would be cheaper.

They did not wait for each other either. The quay has a long rail with numbered hooks, and a cart that came off the
boat was hung with the number of the hook where its owner's goods were to be put. The unloader never had to ask
whether the boat was full when it left; he counted the numbers as they came off, and when the last one on his list had
come, the trip was done. Once a storm broke the order of the crossing, and the boat had to land its cargo in three
trips, in the dark, with some of the last carts coming first. It made no difference. He counted, and at the fortieth
number he locked the shed and went home.

Today the ferry is electric and carries two hundred cars. The timetable is a page that updates itself, the Three
Clerks have lights on them, and the salt sheds are a hotel whose guests pay a good deal for what others once got for
being late. But the deck is still loaded from the middle, there is still one crew for each quay, and on the rail,
under many coats of grey paint, the numbers of the hooks can still be felt with a finger."""


@dataclass(frozen=True, slots=True)
class Question:
    """`title`: for the table. `max_tokens`: at most so many new tokens."""

    title: str
    messages: tuple[Message, ...]
    max_tokens: int = 48


def ask(title: str, text: str, max_tokens: int = 48) -> Question:
    return Question(title, ({"role": "user", "content": text},), max_tokens)


DEMO_QUESTIONS = (
    ask("long passage", f"{PASSAGE}\n\nHow did the unloader know that a trip was done?", 64),
    ask("capital", "What is the capital of France? Answer in one sentence."),
    ask("sky", "Why is the sky blue? Explain it to a child in two sentences."),
    ask("list", "Name three fruits that are red."),
    ask("unicode", "Translate to English: „Guten Morgen, schöne Welt“ 🌍"),
    Question(
        "follow-up",
        (
            {"role": "user", "content": "My name is Ada and I repair bicycles."},
            {"role": "assistant", "content": "Nice to meet you, Ada! What is the most common repair?"},
            {"role": "user", "content": "Flat tyres. What is my name, and what do I repair?"},
        ),
    ),
    ask("code", "Write a Python function that returns the larger of two numbers."),
)
"""All asked at once, on a cluster of three decode nodes."""
