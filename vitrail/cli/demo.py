"""`vitrail demo`: one photograph on its way through the model."""


def demo() -> None:
    """Send one photograph through a Ti/16 and say what becomes of it at every step.

    The weights are random, so the answer is a guess; the way there is the real one.
    """
    import matplotlib.cbook
    import torch
    from PIL import Image
    from rich.console import Console
    from rich.table import Table

    from vitrail.model.vit import ViT
    from vitrail.zoo.presets import preset

    with matplotlib.cbook.get_sample_data("grace_hopper.jpg") as file:
        photo = Image.open(file).convert("RGB").crop((0, 0, 512, 512)).resize((224, 224))
    pixels = torch.frombuffer(bytearray(photo.tobytes()), dtype=torch.uint8)
    x = pixels.reshape(1, 224, 224, 3).permute(0, 3, 1, 2) / 127.5 - 1

    torch.manual_seed(0)
    model = ViT(preset("Ti/16")).eval()
    with torch.inference_mode():
        patches = model.patch_embed(x)
        tokens, _ = model.embed(x)
        attention = model.blocks[0].attn.weights(model.blocks[0].norm1(tokens), rows=[0])
        encoded = model.encode(x)
        logits = model(x)

    table = Table("what", "shape", "meaning", box=None, header_style="bold")
    table.add_row(
        "pixels", str(list(x.shape)), "a photograph, as numbers from -1 to 1"
    )
    table.add_row(
        "patches",
        str(list(patches.shape)),
        "14 x 14 patches, each multiplied by one matrix",
    )
    table.add_row("tokens", str(list(tokens.shape)), "[CLS] in front, positions added: equation 1")
    table.add_row(
        "attention", str(list(attention.shape)), "whom [CLS] listens to, in each of 3 heads"
    )
    table.add_row("encoded", str(list(encoded.shape)), "after 12 blocks: equations 2 and 3")
    table.add_row("logits", str(list(logits.shape)), "the head reads [CLS]: equation 4")
    console = Console()
    console.print(table)
    highest = logits.softmax(dim=-1).max()
    console.print(f"probability of each class: {highest:.4f}, for nothing is learned yet")
    console.print("the way explained: book/how-it-works.md; every architecture: vitrail models")
