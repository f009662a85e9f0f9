//! User supervision: a runtime under a user's actor, and a user's actors next
//! to the runtime's actors.

use bursar_budgets::testing::HostControl;
use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use bursar::{
    Bytes, ChatError, DeviceChoice, Hint, HostDevice, ModelHandle, Runtime, RuntimeConfig, ractor::Actor,
    ractor::ActorProcessingErr, ractor::ActorRef, ractor::SupervisionEvent,
};
use bursar_actors::responder::Responder;

use crate::stage::{Whole, about, answer, ask, demo, device, eventually, listen, placed, small, story};

/// A user's supervisor. It keeps a runtime with a model, and restarts both when the runtime dies.
struct Keeper;

struct KeeperState {
    device: Arc<HostDevice>,
    runtime: Runtime,
    model: ModelHandle,
    deaths: Arc<AtomicUsize>,
}

enum Ask {
    Current(Responder<(Runtime, ModelHandle)>),
    /// Asks for the granted bytes, which makes an actor's handler ask the budget.
    Granted(Responder<Bytes>),
    /// Asks for a reply of the model, also from within a handler.
    Chat(Responder<String>),
    /// Asks for a long reply, and to be notified of its first token.
    LongChat(Responder<()>, Responder<Result<Whole, ChatError>>),
}

async fn start(device: &Arc<HostDevice>, myself: &ActorRef<Ask>) -> Result<(Runtime, ModelHandle), ActorProcessingErr> {
    let config = RuntimeConfig { device: DeviceChoice::Custom(placed(device)), ..RuntimeConfig::default() };
    let runtime = Runtime::start_linked(config, myself.get_cell()).await?;
    let model = demo(&runtime, small()).await;
    Ok((runtime, model))
}

impl Actor for Keeper {
    type Msg = Ask;
    type State = KeeperState;
    type Arguments = (Arc<HostDevice>, Arc<AtomicUsize>);

    async fn pre_start(
        &self,
        myself: ActorRef<Ask>,
        (device, deaths): Self::Arguments,
    ) -> Result<KeeperState, ActorProcessingErr> {
        let (runtime, model) = start(&device, &myself).await?;
        Ok(KeeperState { device, runtime, model, deaths })
    }

    async fn handle(&self, _: ActorRef<Ask>, message: Ask, state: &mut KeeperState) -> Result<(), ActorProcessingErr> {
        match message {
            Ask::Current(reply) => reply.answer((state.runtime.clone(), state.model.clone())),
            Ask::Granted(reply) => reply.answer(state.runtime.budget().snapshot().await?.granted),
            Ask::Chat(reply) => reply.answer(answer(&state.model, about(1)).await),
            Ask::LongChat(begun, reply) => {
                let mut chat = state.model.chat(about(1).max_tokens(150)).await?;
                drop(chat.next().await);
                begun.answer(());
                reply.answer(listen(chat).await);
            }
        }
        Ok(())
    }

    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<Ask>,
        event: SupervisionEvent,
        state: &mut KeeperState,
    ) -> Result<(), ActorProcessingErr> {
        if let SupervisionEvent::ActorFailed(cell, _) | SupervisionEvent::ActorTerminated(cell, ..) = event
            && cell.get_id() == state.runtime.cell().get_id()
        {
            state.deaths.fetch_add(1, Ordering::SeqCst);
            (state.runtime, state.model) = start(&state.device, &myself).await?;
        }
        Ok(())
    }
}

async fn asked<T>(keeper: &ActorRef<Ask>, question: impl FnOnce(Responder<T>) -> Ask) -> T {
    let (reply, answer) = Responder::new();
    assert!(keeper.send_message(question(reply)).is_ok(), "the keeper lives");
    answer.await.expect("the keeper answers")
}

#[test]
fn a_user_supervisor_replaces_a_dead_runtime_on_the_same_device() {
    story(async {
        let (device, deaths) = (device(), Arc::new(AtomicUsize::new(0)));
        let (keeper, _) = Keeper::spawn(None, Keeper, (device.clone(), deaths.clone())).await.expect("an actor");
        let expected = asked(&keeper, Ask::Chat).await;
        for death in 1..=3 {
            let (runtime, model) = asked(&keeper, Ask::Current).await;
            let granted = asked(&keeper, Ask::Granted).await;
            let reply = model.chat(about(1).max_tokens(150)).await.expect("accepted");
            match death {
                1 => runtime.cell().kill(),
                2 => runtime.cell().stop(None),
                _ => {
                    drop(runtime.cell().send_message(bursar_actors::runtime::RuntimeMessage::InjectFault(
                        bursar::FaultInjection::Panic,
                    )))
                }
            }
            drop(crate::stage::listen(reply).await);
            eventually("the supervisor has noticed the death", async || deaths.load(Ordering::SeqCst) == death).await;
            let (another, _) = asked(&keeper, Ask::Current).await;
            assert_ne!(another.cell().get_id(), runtime.cell().get_id());
            assert_eq!(asked(&keeper, Ask::Chat).await, expected, "after death {death}");
            assert_eq!(asked(&keeper, Ask::Granted).await, granted, "after death {death}");
            drop((runtime, model));
            eventually("only the new runtime holds memory", async || device.counts().backed == granted).await;
        }
        // The runtime dies with its supervisor.
        let (runtime, model) = asked(&keeper, Ask::Current).await;
        keeper.kill();
        runtime.cell().wait(None).await.expect("a wait without a time limit");
        let error = ask(&model, about(1)).await.expect_err("the runtime has ended");
        assert!(matches!(error, bursar::ChatError::Stopped { .. }), "{error:?}");
        drop((runtime, model));
        eventually("all memory is unbacked", async || device.counts().backed.is_zero()).await;
    });
}

#[test]
fn a_supervisor_busy_with_a_chat_replaces_its_dead_runtime() {
    story(async {
        let (keeper, _) = Keeper::spawn(None, Keeper, (device(), Arc::default())).await.expect("the actor starts");
        let (runtime, _) = asked(&keeper, Ask::Current).await;
        let ((begun, begins), (reply, end)) = (Responder::new(), Responder::new());
        assert!(keeper.send_message(Ask::LongChat(begun, reply)).is_ok(), "the keeper lives");
        begins.await.expect("the chat begins");
        // The keeper is busy with its chat, so the supervision event waits in the keeper's mailbox
        // with the other messages that ractor sends.
        runtime.cell().kill();
        match end.await.expect("the keeper answers") {
            Ok(_) | Err(ChatError::Stopped { .. }) => {}
            Err(error) => panic!("{error:?}"),
        }
        runtime.cell().wait(None).await.expect("a wait without a time limit");
        assert!(!asked(&keeper, Ask::Chat).await.is_empty(), "another runtime serves");
    });
}

#[test]
fn a_runtime_does_not_start_under_a_dead_supervisor() {
    story(async {
        let device = device();
        let (keeper, _) = Keeper::spawn(None, Keeper, (device.clone(), Arc::default())).await.expect("an actor");
        keeper.kill_and_wait(None).await.expect("the actor ends");
        let config = RuntimeConfig { device: DeviceChoice::Custom(placed(&device)), ..RuntimeConfig::default() };
        let error = Runtime::start_linked(config, keeper.get_cell()).await.err().expect("its supervisor has ended");
        assert!(matches!(error, bursar::RuntimeError::Spawn(_)) && !error.hint().is_empty(), "{error:?}");
        eventually("all memory is unbacked", async || device.counts().backed.is_zero()).await;
    });
}

/// A user's actor that depends on an engine: it is linked under the engine and dies with it.
struct Dependant;

impl Actor for Dependant {
    type Msg = ();
    type State = ();
    type Arguments = ();

    async fn pre_start(&self, _: ActorRef<()>, (): ()) -> Result<(), ActorProcessingErr> {
        Ok(())
    }
}

#[test]
fn a_linked_user_actor_dies_with_its_engine() {
    story(async {
        let stage = crate::stage::Stage::set(small()).await;
        let before = stage.snapshot().await;
        let engine = stage.runtime.supervised().await.expect("the runtime answers").engines["demo"].clone();
        let (first, _) = Dependant::spawn_linked(None, Dependant, (), engine.clone()).await.expect("the actor starts");
        let (second, _) = Dependant::spawn_linked(None, Dependant, (), engine.clone()).await.expect("the actor starts");
        let expected = answer(&stage.model, about(1)).await;
        first.kill_and_wait(None).await.expect("the actor ends");
        assert_eq!(answer(&stage.model, about(1)).await, expected);
        assert_eq!(stage.snapshot().await, before, "the engine ignores a child that it did not start");
        engine.kill();
        second.wait(None).await.expect("a wait without a time limit");
        assert_eq!(answer(&stage.model, about(1)).await, expected, "another engine gives the same reply");
    });
}
