//! Starts of engines: a model's first engine, and the wait until an engine is READY.

use std::sync::Arc;

use bursar_budgets::Label;
use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef};
use tokio::sync::oneshot;

use super::{Engine, RuntimeState};
use crate::{
    budget::Budget,
    chat::{ChatError, ModelHandle, SleepHandle},
    engine::{EngineActor, EngineArguments, RetainedState, StartError, Status, StatusBoard, WeightStore},
    metric,
    responder::Responder,
    runtime::{LoadRequest, OnReleased, RuntimeMessage, core::Input},
    sleep::{SendSleepOrder, WakeState, Wakefulness},
};

impl RuntimeState {
    /// Starts the first engine of a model.
    pub(super) async fn begin(
        &mut self,
        myself: &ActorRef<RuntimeMessage>,
        name: String,
        generation: u64,
        request: LoadRequest,
    ) -> Result<(), ActorProcessingErr> {
        let LoadRequest { source, options, progress, reply } = request;
        let (status, watched) = StatusBoard::new();
        let (label, losses) = (Label::from(name.clone()), self.shown.losses.subscribe());
        metric::expect_model(&label);
        let wakefulness = Wakefulness::new(WakeState::Waking);
        let sleep = SleepHandle {
            wakefulness: wakefulness.clone(),
            within: options.wake_within,
            send: send_sleep_order(myself, &name, generation),
        };
        let requests = (options.requests_for(self.device().is_host_memory()), options.deadlines);
        let handle = ModelHandle::new(label.clone(), watched, requests, losses, sleep);
        let arguments = EngineArguments {
            label,
            source,
            options,
            budget: Budget::at(self.settings.mailbox().clone()),
            device: self.device(),
            card: self.card.clone(),
            weight_store: WeightStore::default(),
            kept: RetainedState::default(),
            wakefulness,
            generation,
            status: Arc::new(status),
            progress,
        };
        let (cell, requests) = (spawn_engine(myself, &arguments).await?, handle.credits().clone());
        tokio::spawn(await_ready(myself.clone(), name.clone(), generation, &arguments));
        self.engines.insert(name.clone(), Engine { cell, arguments, requests, known: None });
        tokio::spawn(await_start(myself.clone(), name, generation, handle, reply));
        Ok(())
    }
}

/// Returns a function that sends a handle's orders to the runtime, for this load of the model and
/// not for another load of the same name.
fn send_sleep_order(myself: &ActorRef<RuntimeMessage>, name: &str, load: u64) -> SendSleepOrder {
    let (myself, name) = (myself.clone(), name.to_owned());
    Arc::new(move |order| {
        // If the runtime has ended, the order is dropped, and the caller gets an error.
        drop(myself.send_message(RuntimeMessage::SleepOrder { name: name.clone(), load, order }));
    })
}

pub(super) async fn spawn_engine(
    myself: &ActorRef<RuntimeMessage>,
    arguments: &EngineArguments,
) -> Result<ActorCell, ActorProcessingErr> {
    let (engine, _) = EngineActor::spawn_linked(None, EngineActor, arguments.clone(), myself.get_cell()).await?;
    Ok(engine.get_cell())
}

/// Waits for a model's start and answers the load. If the caller no longer waits, the model is
/// ended. A failed start is answered once all memory of the model is returned.
async fn await_start(
    runtime: ActorRef<RuntimeMessage>,
    name: String,
    load: u64,
    handle: ModelHandle,
    mut reply: Responder<Result<ModelHandle, Arc<StartError>>>,
) {
    let forget = |waiter| drop(runtime.send_message(RuntimeMessage::Input(Input::Forget { name, load, waiter })));
    let started = tokio::select! {
        started = handle.serving() => started,
        () = reply.given_up() => return forget(None),
    };
    let error = match started {
        Ok(_) => return reply.answer(Ok(handle)),
        Err(ChatError::NotStarted(error)) => error,
        Err(ChatError::Stopped { reason }) => Arc::new(StartError::Stopped { reason }),
        Err(error) => Arc::new(StartError::Stopped { reason: error.to_string().into() }),
    };
    let (on_released, is_released) = oneshot::channel();
    let on_released: OnReleased = Box::new(move |_| {
        let _ = on_released.send(());
    });
    forget(Some(on_released));
    // If the runtime ends before it reads this message, everything that it supervised has ended
    // too. The caller still gets the reason.
    let _ = is_released.await;
    reply.answer(Err(error));
}

/// Reports when an engine is READY. An engine that fails reports its failure itself.
pub(super) fn await_ready(
    myself: ActorRef<RuntimeMessage>,
    name: String,
    load: u64,
    arguments: &EngineArguments,
) -> impl Future<Output = ()> + use<> {
    // After a failed wake, the status may still be `Ready` with the actors that served before.
    // Their generation is below `first`.
    let (mut status, first) = (arguments.status.watch(), arguments.serving_generation(0));
    let is_ready = move |status: &Status| matches!(status, Status::Ready(serving) if serving.generation >= first);
    let is_settled = |status: &Status| matches!(status, Status::Ready(_) | Status::NotWoken(_)) || status.is_over();
    async move {
        let settled = status.wait_for(is_settled).await.map(|status| is_ready(&status));
        if settled.is_ok_and(|is_ready| is_ready) {
            drop(myself.send_message(RuntimeMessage::Input(Input::Woken { name, load })));
        }
    }
}
