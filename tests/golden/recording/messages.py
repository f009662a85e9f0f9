"""Messages, and the chats that the tiny checkpoints are recorded with."""

from .scenes import MODEL_PICTURES

LONG = (
    "A budget actor owns every byte of the device. Each lease says how many bytes an owner may use, and the ledger "
    "refuses what would break the sum. When the device refuses memory, a supervisor restarts the profile with a smaller "
    "target, and the process lives on. Compare that with a runtime that asks the driver whenever it likes: one large "
    "picture, one long prompt, and it is gone. Which of the two would you rather run, and why? Answer in 3 sentences."
)


def text(role, content, **more):
    return {"role": role, "content": content, **more}


def parts(role, *contents):
    """A message with a list of contents: a string becomes a text part, `{"image": …}` an image part.

    A video part stays as it is."""
    as_part = lambda c: {"type": "text", "text": c} if isinstance(c, str) else {"type": "image", **c}  # noqa: E731
    return {"role": role, "content": [as_part(c) for c in contents]}


def picture(name):
    return {"image": name}


def video(name, frames_per_second):
    return {"type": "video", "video": name, "frames_per_second": frames_per_second}


def content_parts(messages):
    """The parts of all messages whose content is a list, in order."""
    return [part for message in messages if isinstance(message["content"], list) for part in message["content"]]


def without_video_fields(messages):
    """The messages with each video part reduced to its type, as a chat template expects it."""
    bare = lambda part: {"type": "video"} if part["type"] == "video" else part  # noqa: E731
    return [
        message if isinstance(message["content"], str) else message | {"content": [bare(part) for part in message["content"]]}
        for message in messages
    ]


def text_chats():
    """Chats of the text-only families, by case name."""
    return {
        "short": [text("user", "Hi!")],
        "long": [text("system", "You are terse."), text("user", LONG), text("assistant", "The first."), text("user", "Why?")],
    }


def picture_chats():
    """Chats with pictures of the Qwen-VL families, by case name."""
    scene, wide, square, tiny, large = map(picture, MODEL_PICTURES)
    return {
        "single_image": [parts("user", scene, "What is in this picture?")],
        "several_images": [parts("user", "First ", wide, " then ", tiny, " and last ", large, " Which is larger?")],
        "two_turns": [
            text("system", "Be brief."),
            parts("user", square, "Describe the picture."),
            text("assistant", "A red circle."),
            parts("user", "And this? ", scene),
        ],
        "same_image_twice": [parts("user", tiny, tiny, "Are the two the same?")],
        "text_only": [text("user", "How many shapes are there?")],
        "long_text": [parts("user", LONG + " Look: ", large, " Say what it's about, then " + LONG[:96])],
    }


def video_chats():
    """Chats with videos, by case name. A temporal patch is two frames, so it lasts 2 / frames_per_second seconds: 1 s at
    a rate of 2, 2 s at 1, and a fraction of a second at 3 and 8."""
    scene = picture("scene_101x157.png")
    return {
        "video_even": [parts("user", video("even", 2.0), "What is in this video?")],
        "video_odd_slow": [parts("user", video("odd", 1.0), "Describe the video in one word.")],
        "video_fraction": [parts("user", video("long", 3.0), "Which of the shapes moves?")],
        "video_and_picture": [
            text("system", "Be brief."),
            parts("user", "First ", video("even", 1.0), " then ", scene, " Compare the two."),
        ],
        "two_videos": [
            parts("user", video("odd", 8.0), "What is this?"),
            text("assistant", "A square."),
            parts("user", "And ", video("long", 0.5), " in this?"),
        ],
    }
