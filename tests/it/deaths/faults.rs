//! Injected faults: the victim, the kind of fault, and waiting until the fault has taken effect.

use bursar::{FaultInjection, ractor::ActorCell};
use bursar_actors::{
    budget::BudgetMessage, engine::EngineMessage, engine::WhichLane, profile::ProfileMessage, responder::Responder,
    runtime::RuntimeMessage, scheduler::SchedulerMessage, vision::VisionMessage,
};

use super::world::World;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Victim {
    Runtime,
    Engine,
    Budget,
    Profile,
    Vision,
    Scheduler,
    StepLane,
    VisionLane,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Panic,
    Fail,
    Kill,
    Stop,
    Supervisor,
}

/// When the fault happens: before any request, while weights are copied, while worst cases run,
/// before a reply's first token, or between its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    Idle,
    Loading,
    Profiling,
    Prefilling,
    Decoding,
}

pub const WAYS: [Way; 5] = [Way::Panic, Way::Fail, Way::Kill, Way::Stop, Way::Supervisor];
pub const MOMENTS: [Moment; 5] =
    [Moment::Idle, Moment::Loading, Moment::Profiling, Moment::Prefilling, Moment::Decoding];

/// Injects a fault into the `victim` of the model `name`, and returns after the victim has ended.
pub async fn inject_fault(world: &World, name: &str, victim: Victim, way: Way) {
    match (victim, way) {
        (Victim::StepLane, Way::Panic) => drill_lane(&world.engine(name).await, WhichLane::Step).await,
        (Victim::VisionLane, Way::Panic) => drill_lane(&world.engine(name).await, WhichLane::Vision).await,
        // A lane's supervisor is its engine.
        (Victim::StepLane | Victim::VisionLane, Way::Supervisor) => {
            end(&world.engine(name).await, ActorCell::kill).await
        }
        (Victim::StepLane | Victim::VisionLane, _) => panic!("{victim:?} cannot end by {way:?}"),
        _ => {
            let cell = cell_of(world, name, victim).await;
            match way {
                Way::Panic => end(&cell, |cell| drill(cell, victim, FaultInjection::Panic)).await,
                Way::Fail => end(&cell, |cell| drill(cell, victim, FaultInjection::Fail)).await,
                Way::Kill => end(&cell, ActorCell::kill).await,
                Way::Stop => end(&cell, |cell| cell.stop(None)).await,
                Way::Supervisor => {
                    let supervisor = cell.try_get_supervisor().expect("every victim here has a supervisor");
                    end(&cell, |_| supervisor.kill()).await;
                }
            }
        }
    }
}

async fn cell_of(world: &World, name: &str, victim: Victim) -> ActorCell {
    match victim {
        Victim::Runtime => world.runtime.cell(),
        Victim::Budget => world.runtime.supervised().await.expect("the runtime answers").budget,
        Victim::Engine => world.engine(name).await,
        Victim::Profile => child::<ProfileMessage>(&world.engine(name).await),
        Victim::Vision => child::<VisionMessage>(&world.engine(name).await),
        Victim::Scheduler => child::<SchedulerMessage>(&world.engine(name).await),
        Victim::StepLane | Victim::VisionLane => panic!("a lane is not an actor"),
    }
}

fn child<M: bursar::ractor::Message>(engine: &ActorCell) -> ActorCell {
    let found = engine.get_children().into_iter().find(|child| child.is_message_type_of::<M>() == Some(true));
    found.expect("the engine has such a child at this moment")
}

fn drill(cell: &ActorCell, victim: Victim, drill: FaultInjection) {
    let sent = match victim {
        Victim::Runtime => cell.send_message(RuntimeMessage::InjectFault(drill)).is_ok(),
        Victim::Budget => cell.send_message(BudgetMessage::InjectFault(drill)).is_ok(),
        Victim::Engine => cell.send_message(EngineMessage::InjectFault(drill)).is_ok(),
        Victim::Profile => cell.send_message(ProfileMessage::InjectFault(drill)).is_ok(),
        Victim::Vision => cell.send_message(VisionMessage::InjectFault(drill)).is_ok(),
        Victim::Scheduler => cell.send_message(SchedulerMessage::InjectFault(drill)).is_ok(),
        Victim::StepLane | Victim::VisionLane => false,
    };
    assert!(sent, "{victim:?} lives and accepts the fault");
}

/// Injects the fault and waits until `cell` has ended.
async fn end(cell: &ActorCell, inject_fault: impl FnOnce(&ActorCell)) {
    inject_fault(cell);
    cell.wait(None).await.expect("a wait without a time limit");
}

async fn drill_lane(engine: &ActorCell, which: WhichLane) {
    let (ended, end) = Responder::new();
    assert!(engine.send_message(EngineMessage::KillLane { which, ended }).is_ok(), "the engine lives");
    end.await.expect("the engine has such a lane at this moment");
}
