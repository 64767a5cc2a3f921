"""Chat records with images: every form people have, as the model's own processor renders it."""

import base64
import io

import pytest
from PIL import Image

import treewise as tw
from tests.image_models import IMAGE_TOKEN, png, tiny_processor
from treewise.data import load_trees
from treewise.errors import ConfigError, DataError

PARTS = (
    "{% for m in messages %}<s> {{ m['role'] }} {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}<image>{% else %}{{ p['text'] }}{% endif %} {% endfor %}"
    "{% endif %}</s>{% endfor %}{% if add_generation_prompt %}<s> assistant {% endif %}"
)
IF_TEXT, END_IF = "{% if m['content'] is string %}{{ m['content'] }}{% else %}", "{% endif %}</s>"
PARTS_ALONE = PARTS.replace(IF_TEXT, "").replace(END_IF, "</s>")


@pytest.fixture(scope="module")
def shots(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shots")
    for seed in range(5):
        (folder / f"{seed}.png").write_bytes(png(seed))
    return folder


@pytest.fixture(scope="module", params=[PARTS, PARTS_ALONE], ids=["text or parts", "parts alone"])
def processor(request):
    made = tiny_processor("llava")
    made.chat_template = request.param
    return made


def user(*parts):
    shaped = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": "user", "content": shaped}


def answer(text):
    return {"role": "assistant", "content": text}


def own_ids(processor, messages, pictures):
    """What the processor makes of a conversation by itself."""
    shaped = []
    for message in messages:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        parts = [part if part["type"] == "text" else {"type": "image"} for part in parts]
        is_text = isinstance(content, str) and processor.chat_template == PARTS
        shaped.append({"role": message["role"], "content": content if is_text else parts})
    text = processor.apply_chat_template(shaped, tokenize=False)
    return processor(text=text, images=[Image.open(io.BytesIO(each)) for each in pictures])["input_ids"][0]


def test_each_call_is_what_the_processor_makes_of_it(processor, shots):
    messages = [
        user({"type": "image", "image": str(shots / "1.png")}, "w1 w2"),
        answer("w3"),
        user("w5", {"type": "image_url", "image_url": {"url": str(shots / "2.png")}}, "w6"),
        answer("w4 w7"),
    ]
    (tree,) = load_trees([{"messages": messages}], processor)
    first, second = tree.trajectories
    assert first.token_ids.tolist() == list(own_ids(processor, messages[:2], [png(1)]))
    assert second.token_ids.tolist() == list(own_ids(processor, messages, [png(1), png(2)]))
    assert [each.read() for each in second.images] == [png(1), png(2)]
    for image in second.images:
        assert (second.token_ids[image.start : image.end] == IMAGE_TOKEN).all()
    assert second.loss_weights[second.token_ids == IMAGE_TOKEN].sum() == 0
    assert tree.forest().num_tokens == len(second)  # the first call is a prefix of the second


@pytest.mark.parametrize("glyph", ["\ue0b8", "\ue0b8\ue0b8", "\ue000"])
def test_a_glyph_of_private_use_is_no_image(processor, shots, glyph):
    image = {"type": "image", "image": str(shots / "1.png")}
    messages = [user(f"w1 {glyph} w2", image, f"{glyph} w3"), answer(f"w4 {glyph} w5")]
    (tree,) = load_trees([{"messages": messages}], processor)
    [item] = tree.trajectories
    assert item.token_ids.tolist() == list(own_ids(processor, messages, [png(1)]))
    assert [each.read() for each in item.images] == [png(1)]
    (tree,) = load_trees([{"messages": [user(f"w1 {glyph}"), answer(glyph)]}], processor)
    assert not tree.trajectories[0].images


def test_forms_of_images_are_one_image(processor, shots, write):
    path = str(shots / "1.png")
    address = "data:image/png;base64," + base64.b64encode(png(1)).decode()
    parts = [
        {"type": "image", "image": path},
        {"type": "image", "path": path},
        {"type": "image_url", "image_url": {"url": address}},
        {"type": "image_url", "image_url": path},
        {"type": "input_image", "image_url": address},
        {"type": "image", "source": {"type": "base64", "data": base64.b64encode(png(1)).decode()}},
    ]
    records = [{"messages": [user(part, "w1"), answer("w2")], "group": "g"} for part in parts]
    records.append({"messages": [user({"type": "image"}, "w1"), answer("w2")], "images": [path], "group": "g"})
    records.append(
        {"prompt": [user({"type": "image"}, "w1")], "completion": [answer("w2")], "images": [path], "group": "g"}
    )
    (tree,) = load_trees(write(*records), processor, num_workers=0, options={"image_folder": str(shots)})
    assert tree.forest().num_tokens == len(tree.trajectories[0])
    assert len(tree.trajectories) == 8


def test_images_beside_plain_messages_stand_in_front_as_in_trl(processor, shots):
    plain = {
        "messages": [{"role": "user", "content": "w1"}, answer("w2")],
        "images": [str(shots / "1.png"), {"bytes": png(2)}],
    }
    parts = {"messages": [user({"type": "image"}, {"type": "image"}, "w1"), answer("w2")], "images": plain["images"]}
    trees = load_trees([plain, parts], processor)
    if processor.chat_template == PARTS_ALONE:  # the same text
        assert trees[0].trajectories[0].token_ids.tolist() == trees[1].trajectories[0].token_ids.tolist()
    assert [each.read() for each in trees[0].trajectories[0].images] == [png(1), png(2)]


def test_pairs_of_one_prompt_see_its_image(processor, shots):
    asked, path = user({"type": "image"}, "w1"), str(shots / "1.png")
    pair = {"chosen": [asked, answer("w2")], "rejected": [asked, answer("w3 w4")]}
    own = user({"type": "image", "image": path}, "w1")
    records = [
        {**pair, "images": [path]},
        {"prompt": [asked], "chosen": [answer("w2")], "rejected": [answer("w3 w4")], "images": [{"bytes": png(1)}]},
        {"chosen": [own, answer("w2")], "rejected": [own, answer("w3 w4")]},
        {"prompt": [asked], "completion": [answer("w2")], "label": True, "images": [path]},
    ]
    for record in records:
        (tree,) = load_trees([record], processor)
        assert tree.trajectories[0].token_ids.tolist() == list(own_ids(processor, [asked, answer("w2")], [png(1)]))
        assert tree.trajectories[0].reward == 1
        assert {image.read() for item in tree.trajectories for image in item.images} == {png(1)}
    assert load_trees(records[:1], processor)[0].forest().images.start.tolist() == [4]  # seen by both


def test_declared_messages_are_rendered_with_their_images(processor, shots, write):
    first, second = ({"type": "image", "image": f"{seed}.png"} for seed in (1, 2))
    nodes = [
        {"id": 0, "message": user(first, "w1")},
        {"id": 1, "parent": 0, "message": answer("w2")},
        {"id": 2, "parent": 1, "message": user({"type": "image"}, "w3"), "images": ["2.png"]},
        {"id": 3, "parent": 2, "message": answer("w4")},
        {"id": 4, "parent": 0, "message": answer("w5")},
    ]
    path = write({"nodes": nodes})
    path = path.rename(shots / path.name)  # beside the images
    lines = write(*({"tree": "t", **node} for node in nodes), name="lines.jsonl")
    chats = [
        {"messages": [user(first, "w1"), answer("w2"), user(second, "w3"), answer("w4")], "group": "g"},
        {"messages": [user(first, "w1"), answer("w5")], "group": "g"},
    ]
    chats = write(*chats, name="chats.jsonl").rename(shots / "chats.jsonl")
    expected = load_trees(chats, processor)[0].forest()
    for declared in (path, lines.rename(shots / lines.name)):
        found = load_trees(declared, processor)[0].forest()
        assert found.token_ids.tolist() == expected.token_ids.tolist()
        assert found.images.start.tolist() == expected.images.start.tolist()
        assert [each.digest for each in found.images.sources] == [each.digest for each in expected.images.sources]


PICTURE, VIDEO = {"type": "image", "image": "none.png"}, {"type": "video", "video": "a.mp4"}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([user({"type": "image"}), answer("w1")], "0 images in images for 1 image part"),
        ([user(PICTURE), answer("w1")], r"messages\[0\], image 0: .*cannot be read"),
        ([user("w1"), {"role": "assistant", "content": [PICTURE]}], "images are not sampled"),
        ([user("<image> w1"), answer("w1")], "holds 1 image token for 0 images"),
        ([user(VIDEO), answer("w1")], "content of type 'video' is not supported"),
    ],
)
def test_what_is_wrong_is_named(processor, messages, message):
    with pytest.raises(DataError, match=message):
        load_trees([{"messages": messages}], processor)
    with pytest.raises(DataError, match="images beside a prompt"):
        load_trees([{"prompt": "w1", "completion": "w2", "images": ["a.png"]}], processor)


def test_images_need_a_processor(processor, shots):
    record = {"messages": [user({"type": "image", "image": str(shots / "1.png")}, "w1"), answer("w2")]}
    with pytest.raises(DataError, match="need the model's processor"):
        load_trees([record], processor.tokenizer, options={"chat_template": processor.chat_template})
    with pytest.raises(DataError, match="thinking='keep' is not supported for images"):
        load_trees([record], processor, options={"thinking": "keep"})


def test_a_template_that_leaves_images_out_is_an_error(shots):
    made = tiny_processor("llava")
    made.chat_template = PARTS.replace("<image>", "")
    record = {"messages": [user({"type": "image", "image": str(shots / "1.png")}, "w1"), answer("w2")]}
    with pytest.raises(DataError, match="0 image tokens for 1 image"):
        load_trees([record], made)
    assert tw.ImageSpan(shots / "1.png", 0, 1).source == str(shots / "1.png")


def test_line_breaks_around_images_are_part_of_the_text(shots):
    """Gemma 3 writes line breaks around an image, which its tokenizer joins with those of the template."""
    processor = tiny_processor("gemma3")
    processor.chat_template = PARTS.replace("<image>", "\n<start_of_image>\n")
    messages = [user("w1", {"type": "image", "image": str(shots / "1.png")}, "w2"), answer("w3")]
    (tree,) = load_trees([{"messages": messages}], processor)
    (item,) = tree.trajectories
    assert item.token_ids.tolist() == list(own_ids(processor, messages, [png(1)]))
    assert processor.tokenizer.convert_tokens_to_ids("\n\n\n") in item.token_ids
    (image,) = item.images
    assert (item.token_ids[image.start : image.end] == IMAGE_TOKEN).all()
    assert image.end - image.start == 16
    row = {"token_ids": item.token_ids.tolist(), "images": [str(shots / "1.png")]}
    assert load_trees([row], processor)[0].trajectories[0].images == item.images
    processor.image_processor.do_pan_and_scan = True
    with pytest.raises(ConfigError, match="do_pan_and_scan"):
        load_trees([{"messages": messages}], processor)
