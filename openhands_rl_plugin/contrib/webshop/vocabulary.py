"""The product types of the generated shop, with the attributes, options and prices they can have."""

from __future__ import annotations

from dataclasses import dataclass

_COLORS = ("black", "white", "red", "blue", "green", "grey")
_SIZES = ("small", "medium", "large", "x-large")


@dataclass(frozen=True, slots=True)
class ProductType:
    """One kind of product. `prices` are the lowest and highest whole-dollar price."""

    name: str
    department: str
    attributes: tuple[str, ...]
    options: tuple[tuple[str, tuple[str, ...]], ...]
    prices: tuple[int, int]


PRODUCT_TYPES: tuple[ProductType, ...] = (
    ProductType(
        "polo shirt",
        "Clothing",
        ("cotton", "slim fit", "long sleeve", "machine washable", "quick drying", "classic fit"),
        (("color", _COLORS), ("size", _SIZES)),
        (12, 58),
    ),
    ProductType(
        "running shoes",
        "Footwear",
        ("lightweight", "non slip", "breathable", "rubber sole", "arch support", "memory foam"),
        (("color", _COLORS), ("size", ("7", "8", "9", "10", "11"))),
        (34, 118),
    ),
    ProductType(
        "denim jeans",
        "Clothing",
        ("stretch", "straight leg", "high waist", "relaxed fit", "button closure", "hand wash"),
        (("size", ("28", "30", "32", "34", "36")), ("color", ("black", "blue", "grey", "white"))),
        (24, 88),
    ),
    ProductType(
        "backpack",
        "Luggage",
        ("waterproof", "anti theft", "laptop pocket", "lightweight", "padded straps", "usb port"),
        (("color", _COLORS),),
        (22, 96),
    ),
    ProductType(
        "coffee table",
        "Home",
        ("solid wood", "easy assembly", "glass top", "storage space", "steel frame", "scratch resistant"),
        (("color", ("oak", "walnut", "white", "black")),),
        (58, 198),
    ),
    ProductType(
        "throw pillow",
        "Home",
        ("cotton", "machine washable", "hypoallergenic", "hidden zipper", "super soft", "linen"),
        (("color", _COLORS), ("size", ("16 inch", "18 inch", "20 inch"))),
        (8, 38),
    ),
    ProductType(
        "desk lamp",
        "Office",
        ("dimmable", "usb port", "touch control", "energy saving", "swing arm", "clip on"),
        (("color", ("black", "white", "silver", "gold")),),
        (14, 68),
    ),
    ProductType(
        "bluetooth speaker",
        "Electronics",
        ("waterproof", "portable", "stereo sound", "long battery", "fast charging", "voice control"),
        (("color", _COLORS),),
        (18, 98),
    ),
    ProductType(
        "wireless headphones",
        "Electronics",
        ("noise cancelling", "foldable", "long battery", "fast charging", "sweat proof", "deep bass"),
        (("color", ("black", "white", "blue", "pink")),),
        (24, 138),
    ),
    ProductType(
        "phone case",
        "Electronics",
        ("shock proof", "slim", "magnetic", "card holder", "clear", "wireless charging"),
        (("color", _COLORS), ("model", ("pixel 8", "galaxy s23", "iphone 14", "iphone 15"))),
        (8, 38),
    ),
    ProductType(
        "face cream",
        "Beauty",
        ("cruelty free", "fragrance free", "anti aging", "oil free", "vegan", "hyaluronic acid"),
        (("size", ("1 oz", "2 oz", "4 oz")),),
        (9, 58),
    ),
    ProductType(
        "shampoo",
        "Beauty",
        ("sulfate free", "paraben free", "tea tree", "vegan", "color safe", "argan oil"),
        (("scent", ("lavender", "coconut", "mint", "citrus")), ("size", ("8 oz", "12 oz", "16 oz"))),
        (7, 36),
    ),
    ProductType(
        "toothbrush",
        "Beauty",
        ("soft bristles", "eco friendly", "bamboo", "travel size", "easy grip", "bpa free"),
        (("color", ("blue", "green", "pink", "white")), ("pack", ("2 pack", "4 pack", "8 pack"))),
        (5, 28),
    ),
    ProductType(
        "granola bars",
        "Grocery",
        ("gluten free", "low sugar", "high protein", "nut free", "organic", "non gmo"),
        (("flavor", ("chocolate", "peanut", "berry", "honey")),),
        (6, 34),
    ),
    ProductType(
        "herbal tea",
        "Grocery",
        ("organic", "caffeine free", "fair trade", "loose leaf", "kosher", "sugar free"),
        (("flavor", ("ginger", "mint", "chamomile", "lemon")), ("pack", ("20 bags", "40 bags", "80 bags"))),
        (6, 32),
    ),
    ProductType(
        "water bottle",
        "Outdoor",
        ("insulated", "leak proof", "bpa free", "stainless steel", "wide mouth", "dishwasher safe"),
        (("color", _COLORS), ("size", ("16 oz", "24 oz", "32 oz"))),
        (11, 48),
    ),
    ProductType(
        "yoga mat",
        "Outdoor",
        ("non slip", "extra thick", "eco friendly", "foldable", "carrying strap", "natural rubber"),
        (("color", ("purple", "blue", "green", "black", "pink")),),
        (14, 78),
    ),
    ProductType(
        "camping tent",
        "Outdoor",
        ("waterproof", "instant setup", "windproof", "double layer", "uv protection", "lightweight"),
        (("size", ("2 person", "4 person", "6 person")), ("color", ("green", "orange", "blue", "grey"))),
        (48, 188),
    ),
    ProductType(
        "window curtains",
        "Home",
        ("blackout", "thermal", "machine washable", "rod pocket", "noise reducing", "linen"),
        (("color", _COLORS), ("size", ("63 inch", "84 inch", "96 inch"))),
        (16, 78),
    ),
    ProductType(
        "dog bed",
        "Pets",
        ("orthopedic", "washable cover", "memory foam", "non slip", "chew proof", "super soft"),
        (("size", _SIZES), ("color", ("grey", "brown", "blue"))),
        (19, 98),
    ),
)

# Common short words: a brand tells two listings apart at the cost of one token.
BRANDS: tuple[str, ...] = (
    "Nova", "Terra", "Apex", "Luna", "Echo", "Atlas", "Aurora", "Pine", "River", "Summit",
    "Harbor", "Stone", "Delta", "Solar", "Orion", "Maple", "Coral", "Amber", "Bloom", "Crown",
    "Falcon", "Ivy", "Metro", "Polar", "Royal", "Sage", "Titan", "Vista", "Willow", "Zen",
)  # fmt: skip
