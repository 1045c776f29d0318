"""Which machines a listing allows, and how it knows them."""

from __future__ import annotations

from spark_elastic.driver.hosts import Host, Place
from spark_elastic.driver.listing import HostListing


def test_machines_that_were_never_listed_are_left_alone() -> None:
    listing = HostListing()
    listing.update({"a": None})
    assert listing.plan([Host(0, 0, "b", Place("b", 0)), Host(1, 1, "a", Place("a", 0))]) == ([], [])


def test_a_machine_is_known_by_its_name_its_short_name_or_its_address() -> None:
    hosts = [Host(0, 0, "a.net", "p"), Host(1, 1, "b", "p", address="10.0.0.1"), Host(2, 2, "c.net", "p")]
    listing = HostListing()
    listing.update({"a": None, "10.0.0.1": None, "c.net": None})
    listing.update({})
    assert listing.plan(hosts) == (hosts, [])
