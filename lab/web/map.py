"""The map of a study over several links: which fixed strategy was the fastest where."""

from __future__ import annotations

from lab.analysis.places import REFERENCE, Place, columns_of, on_most_ranks, places_of
from lab.analysis.records import Study
from lab.draw.looks import looks_of
from lab.web.texts import interval_text
from lab.web.vega import Chart, Spec

CELL, ROW, LETTER = 130, 52, 7  # pixels
WORDS = "split(replace(datum.label, regexp('cluster[.]', 'g'), ''), ' ')"  # one below the other
FLAT = {"labelAngle": 0, "labelExpr": WORDS, "labelLimit": CELL, "labelOverlap": False}
PALE = {"test": "datum.alike", "value": 0.12}


def map_chart(study: Study, floor: float, name: str) -> Chart | None:
    """Chart the fastest strategy by model, batch and links; None: there are not two such places.

    Args:
        floor: the study's noise floor.
    """
    places = on_most_ranks(places_of(study.cells))
    if len({place.where.links for place in places}) < 2:
        return None
    data = [_datum(place, floor) for place in places]
    fastest = list(dict.fromkeys(str(one["fastest"]) for one in data))
    looks = looks_of(fastest)
    links = columns_of(place.where for place in places)
    room = LETTER * max(len(str(one["model"])) for one in data)
    cell = {
        "x": {"field": "links", "type": "nominal", "sort": links, "title": "links", "axis": FLAT},
        "y": {"field": "model", "type": "nominal", "title": None, "axis": {"minExtent": room}},
    }
    colour = {
        "field": "fastest",
        "type": "nominal",
        "scale": {"domain": fastest, "range": [looks[each].colour for each in fastest]},
    }
    tooltip = [
        {"field": field, "title": title}
        for field, title in {
            **{"model": "model", "links": "links", "fastest": "fastest", "alike": "as fast"},
            **{"factor": f"step of {REFERENCE} over its step", "others": "all, fastest first"},
        }.items()
    ]
    text: Spec = {**cell, "color": {"value": "#1a1a1a"}}
    spec: Spec = {
        "data": {"values": data},
        "width": {"step": CELL},
        "height": {"step": ROW},
        "layer": [
            {
                "mark": {"type": "rect", "stroke": "white", "strokeWidth": 2},
                "encoding": {
                    **{**cell, "color": colour, "tooltip": tooltip},
                    "fillOpacity": {
                        "condition": {"test": "datum.alike", "value": 0.12},
                        "value": 0.5,
                    },
                },
            },
            {
                "mark": {"type": "text", "dy": -8, "fontWeight": "bold"},
                "encoding": {**text, "text": {"field": "fastest"}},
            },
            {
                "mark": {"type": "text", "dy": 9, "fontSize": 10},
                "encoding": {**text, "text": {"field": "factor"}},
            },
        ],
    }
    ranks = places[0].where.world_size
    note = f"below the name: step of {REFERENCE} over its step; pale: others are not told apart"
    return Chart(name, f"Fastest fixed strategy on {ranks} ranks", note, spec)


def _datum(place: Place, floor: float) -> dict[str, object]:
    lead = place.lead(floor)
    steps = sorted(place.fixed(), key=lambda name: place.ratio(name, lead.name).mid)
    return {
        "model": f"{place.where.model}, batch {place.where.batch_size}",
        "links": place.where.links,
        "fastest": lead.name,
        "alike": ", ".join(lead.others),
        "factor": f"× {interval_text(lead.factor)}",
        "others": ", ".join(f"{name} {place.ratio(name, lead.name).mid:.2f}" for name in steps),
    }
