"""Brokers that demand permissions: what applications may do, and what brokers know of it."""

from __future__ import annotations

import asyncio

from cepheid_metadata import MemoryStore, NamespacePermissions, change_permissions
from cepheid_security.settings import AuthorizationSettings
from tests.roles_by_name import RolesByName
from tests.simulation.scenarios.language import ScenarioError, step
from tests.simulation.scenarios.scene import Scene
from tests.simulation.scenarios.steps.clients import Application, of
from tests.simulation.world.sim_broker import SimBroker
from tests.simulation.world.sim_clock import true_ms
from tests.simulation.world.sim_producer import SimProducer
from tests.simulation.world.sim_serving import NAMESPACE


@step("{broker} demands permissions, and uses known ones for {seconds} without metadata")
def demands_permissions(scene: Scene, broker: SimBroker, stale_s: float) -> None:
    """Of applications, whose names are their roles. From the time that it serves them."""
    authorization = AuthorizationSettings(enabled=True, stale_s=stale_s)
    broker.broker_settings = broker.broker_settings.model_copy(update={"authorization": authorization})
    broker.authenticator = RolesByName()


@step("application {application} may publish")
async def may_publish(scene: Scene, application: Application) -> None:
    """It is granted that, on the namespace of its topic."""
    application.client.role = application.client.name
    await _permit(scene, NamespacePermissions(namespace={application.client.name: ("produce",)}))


@step("application {application} may not publish any more")
async def may_not_publish(scene: Scene, application: Application) -> None:
    """Metadata says so; brokers may not know it yet."""
    await _permit(scene, NamespacePermissions())


async def _permit(scene: Scene, permissions: NamespacePermissions) -> None:
    await change_permissions(MemoryStore(scene.tree), *NAMESPACE, lambda _: permissions)


@step("{broker} is cut off from metadata")
def is_cut_off(scene: Scene, broker: SimBroker) -> None:
    """It alone; its session lives on."""
    broker.store.suspend()


@step("{broker} reaches metadata again")
def reaches_metadata(scene: Scene, broker: SimBroker) -> None:
    """In the same session."""
    broker.store.resume()


@step("application {application} publishes a message, and for {seconds} nothing is answered")
async def is_not_answered(scene: Scene, application: Application, duration_s: float) -> None:
    """Whatever it does meanwhile to be connected again."""
    producer = _producer_of(application)
    of(scene).published_ms.append(true_ms())
    producer.publish(1, "", batch=False)
    waiting = len(producer.unanswered)
    await asyncio.sleep(duration_s)
    scene.require(len(producer.unanswered) == waiting, lambda: f"{producer!r} was answered")


@step("everything that application {application} published is answered")
async def all_is_answered(scene: Scene, application: Application) -> None:
    """Waits for it."""
    producer = _producer_of(application)
    await scene.wait_until(lambda: not producer.unanswered, "all is answered")


def _producer_of(application: Application) -> SimProducer:
    if application.producer is None:
        raise ScenarioError(f"{application.client.name} has not published anything yet")
    return application.producer
