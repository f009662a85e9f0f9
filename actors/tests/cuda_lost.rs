//! Loss of a GPU while a model serves on it: every caller gets an error, every byte is returned,
//! and the runtime ends with the reason. After a loss, the driver creates no second context in the
//! process, so this program has only one story. Without a GPU, the story prints a note and passes.

#[path = "cuda/gpu/mod.rs"]
mod gpu;

use std::{collections::BTreeMap, sync::Arc};

use bursar_actors::{
    chat::{ChatError, ChatEvent, ModelHandle, Reply},
    engine::LoadOptions,
    event::{Event, Events},
    runtime::{ModelSource, RuntimeError},
};
use bursar_budgets::{Address, Bytes, Class, Device, DeviceError, Hint, LeaseId, Segment, Workspace};
use bursar_kernels::{Cuda, CudaKernels, CudaTarget, KernelError, Scope, Tensor, WorkCounter, ops::gelu::Gelu};
use bursar_model::Envelope;
use gpu::{
    Stage, answer, eventually, options, other_process, other_process::OtherProcess, picture, question, soon, story,
};
use tokio::task::JoinHandle;

/// The name of the test that runs as the other process.
const OTHER_PROCESS: &str = "another_process_takes_the_requested_bytes";

/// Sequences that run at once, which is also the number of replies that stream.
const STREAMING: usize = 4;

/// Requests that wait until one of these sequences ends.
const WAITING: usize = 8;

/// Tokens of a reply: enough that waiting requests are still waiting when the device is lost.
const TOKENS: usize = 1900;

/// The tolerance for memory that the driver takes and returns for itself: a few MiB, 2 MiB at a
/// time.
const ROUNDING: Bytes = Bytes::mib(16);

#[test]
fn another_process_takes_the_requested_bytes() {
    other_process::live();
}

/// Another user of the device in this process, with one page of memory, addresses for two pages,
/// and a kernel to run.
struct Tenant {
    cuda: Cuda,
    workspace: Workspace,
}

impl Tenant {
    async fn with_memory(stage: &Stage) -> Tenant {
        let target = CudaTarget::of(&stage.device).expect("the device reports its target");
        let kernels = CudaKernels::load(&stage.device, target, &options().blas).expect("the kernels load");
        let cuda = Cuda::new(&kernels).expect("a stream");
        let page = stage.device.page();
        let lease = stage
            .runtime
            .budget()
            .lease(Class::external("index"), page)
            .await
            .expect("the budget has memory for a lease");
        let segment = Segment::reserve(stage.runtime.device(), page * 2, lease).expect("the addresses can be reserved");
        segment.back_to(page).expect("the segment is backed");
        Tenant { cuda, workspace: Workspace::over(segment) }
    }

    /// Runs the kernel on memory at this address, and waits for the result.
    fn compute_at(&self, address: Address) -> Result<(), KernelError> {
        let counter = WorkCounter::default();
        let scope = Scope::new(&self.cuda, &self.workspace, &counter);
        // SAFETY: both pages belong to this tenant, and only this thread uses them. The second page
        // has no memory, but the fault stays on the device and is what this story tests.
        let mut x = unsafe { Tensor::persistent(address, [1, 64], scope.target().activation()) };
        scope.gelu(&mut x, Gelu::Erf)?;
        self.cuda.wait()
    }

    /// Runs the kernel on addresses without memory. Afterward, the context is broken for the whole
    /// process.
    fn write_out_of_bounds(&self) {
        let start = self.workspace.address();
        self.compute_at(start).expect("a kernel can access the tenant's page");
        let error = self.compute_at(start.offset(self.workspace.capacity())).expect_err("the address is not mapped");
        assert!(matches!(&error, KernelError::Device(error) if error.is_lost()), "{error:?}");
        println!("the tenant gets the error: {error}");
    }
}

/// Chats that have not ended.
struct Open {
    /// Replies whose first token was read, and nothing after it.
    streaming: Vec<Reply>,
    /// Tasks that wait for the next event.
    waiting: Vec<JoinHandle<(usize, Result<(), ChatError>)>>,
}

impl Open {
    async fn on(model: &ModelHandle) -> Open {
        // With log-probabilities, each token is an event even if it has no text, and a reply runs
        // only a few events ahead of its reader. An unread reply therefore does not end, no matter
        // how fast the device is.
        let chat = |number: u32| {
            let chat = question("Describe the picture.", TOKENS).log_probabilities(1).cache_salt(number.to_string());
            if number.is_multiple_of(3) { chat } else { chat.image(picture(number)) }
        };
        let mut streaming = Vec::new();
        for number in 0..STREAMING as u32 {
            let mut reply = model.chat(chat(number)).await.expect("the chat is accepted");
            let first = soon("the first token", reply.next()).await;
            first.expect("the reply begins").expect("the first token is no error");
            streaming.push(reply);
        }
        let mut waiting = Vec::new();
        for number in 0..WAITING as u32 {
            let reply = model.chat(chat(100 + number)).await.expect("the chat is accepted");
            waiting.push(tokio::spawn(listen(reply)));
        }
        assert_eq!(model.requests().0, STREAMING + WAITING, "no request has ended");
        Open { streaming, waiting }
    }

    /// Checks that every reply ends with the loss, all with the same reason. Returns the reason.
    async fn assert_all_lost(self) -> Arc<str> {
        let mut reasons = Vec::new();
        for (number, reply) in self.streaming.into_iter().enumerate() {
            let who = format!("streaming {number}");
            let (tokens, outcome) = soon(&who, listen(reply)).await;
            assert!(tokens < TOKENS, "{who} should end before its last token: {tokens} tokens");
            reasons.push(lost(outcome, &who));
        }
        let mut not_begun = 0;
        for (number, tokens) in self.waiting.into_iter().enumerate() {
            let who = format!("waiting {number}");
            let (tokens, outcome) = soon(&who, tokens).await.expect("the task does not panic");
            not_begun += usize::from(tokens == 0);
            reasons.push(lost(outcome, &who));
        }
        println!("{STREAMING} had begun, {not_begun} of {WAITING} had not: {}", reasons[0]);
        assert!(not_begun > 0, "at least one request failed while it waited");
        assert!(
            reasons.iter().all(|reason| *reason == reasons[0]),
            "all requests report the same reason for one loss: {reasons:?}"
        );
        reasons.swap_remove(0)
    }
}

/// Reads events until the end. Returns the number of events and the outcome. Checks that
/// nothing follows the end.
async fn listen(mut reply: Reply) -> (usize, Result<(), ChatError>) {
    let mut tokens = 0;
    let outcome = loop {
        match reply.next().await.expect("a reply has an end") {
            Ok(ChatEvent::Done { .. }) => break Ok(()),
            Ok(_) => tokens += 1,
            Err(error) => break Err(error),
        }
    };
    assert!(reply.next().await.is_none(), "the stream has one end");
    (tokens, outcome)
}

/// Checks that a chat failed with a lost device, the driver's message and a
/// hint. Returns the message.
fn lost(outcome: Result<(), ChatError>, who: &str) -> Arc<str> {
    let error = outcome.expect_err(who);
    let ChatError::DeviceLost { reason } = &error else { panic!("{who}: {error:?}") };
    assert_eq!(error.to_string(), **reason, "{who}");
    assert!(reason.contains("the device is lost") && reason.contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{who}: {reason}");
    assert!(error.hint().contains("start the program again"), "{who}: {}", error.hint());
    reason.clone()
}

/// Collects all events of the runtime until the runtime ends.
fn diary(mut events: Events) -> JoinHandle<Vec<Event>> {
    tokio::spawn(async move {
        let mut seen = Vec::new();
        while let Some(recorded) = events.next().await {
            seen.push(recorded.expect("the listener missed no event").event);
        }
        seen
    })
}

/// The bytes that are still leased after all these events.
fn still_leased(events: &[Event]) -> Bytes {
    let mut leases: BTreeMap<LeaseId, Bytes> = BTreeMap::new();
    for event in events {
        match event {
            Event::LeaseGranted(leased) => drop(leases.insert(leased.lease, leased.bytes)),
            Event::LeaseResized { lease, to, .. } => drop(leases.insert(*lease, *to)),
            Event::LeaseFreed(leased) => {
                assert!(leases.remove(&leased.lease).is_some(), "each lease is returned once: {leased:?}")
            }
            _ => {}
        }
    }
    leases.values().sum()
}

/// Checks that exactly one loss is reported, with this reason, and that nothing is restarted after
/// the loss. The stop of the model must have a reason too.
fn assert_loss_reported_once(events: &[Event], reason: &str) {
    let losses: Vec<_> = events.iter().filter(|event| matches!(event, Event::DeviceLost { .. })).collect();
    assert!(matches!(&losses[..], [Event::DeviceLost { reason: found }] if found == reason), "{losses:?}");
    let behind: Vec<_> = events.iter().skip_while(|event| !matches!(event, Event::DeviceLost { .. })).collect();
    let again = |event: &&&Event| matches!(event, Event::Restart { .. } | Event::Ready { .. });
    assert_eq!(behind.iter().find(again), None, "no attempt is repeated on a lost device");
    let stopped = |event: &&Event| matches!(event, Event::Stopped { reason, .. } if reason.contains("lost"));
    assert!(behind.into_iter().any(|event| stopped(&event)), "the model has stopped: {events:?}");
}

/// Checks that the runtime has ended, and that later callers get the reason and a hint.
async fn assert_ended(stage: &Stage, model: &ModelHandle) {
    let error =
        soon("a chat after the end", model.chat(question("Who are you?", 4))).await.expect_err("the runtime has ended");
    println!("a chat after the end: {error}; {}", error.hint());
    assert!(matches!(&error, ChatError::Stopped { reason } if reason.contains("the device is lost")), "{error:?}");
    assert!(error.hint().contains("start the program again"), "{}", error.hint());
    eventually("the runtime has ended", async || stage.runtime.supervised().await.is_err()).await;
    let load = stage.runtime.load_with(ModelSource::demo(), options(), |_| {});
    let error = soon("a load after the end", load).await.err().expect("the runtime has ended");
    println!("a load after the end: {error}; {}", error.hint());
    assert!(matches!(&error, RuntimeError::Device(DeviceError::Lost { .. })), "{error:?}");
    assert!(error.hint().contains("start the program again"), "{}", error.hint());
    soon("a shutdown after the end", stage.runtime.clone().shutdown()).await;
}

#[test]
fn a_lost_gpu_fails_every_chat_frees_bytes_and_ends_runtime() {
    story(async |stage| {
        let mut other_process = OtherProcess::moves_in(OTHER_PROCESS);
        let diary = diary(stage.runtime.events());
        let tenant = Tenant::with_memory(&stage).await;
        let (page, beside) = (stage.device.page(), stage.device.counts());
        assert_eq!(beside.backed, page, "only the tenant's page is still backed");

        let envelope = Envelope { sequences: STREAMING, context_tokens: 2048, ..Envelope::small() };
        let options = LoadOptions { envelope: Some(envelope), kv_tokens: Some(1 << 18), ..options() };
        let loaded = stage.runtime.load_with(ModelSource::demo(), options, |_| {}).await;
        let model = loaded.expect("the demo model starts on a GPU");
        let (serving, free) = (stage.device.counts(), other_process.sees());
        let of_the_model = serving.backed - page;
        assert!(of_the_model > ROUNDING * 4 && serving.pinned > beside.pinned, "{serving:?}");

        let open = Open::on(&model).await;
        tenant.write_out_of_bounds();
        // This chat is refused if the loss has already been noticed. Otherwise it fails like the
        // other chats.
        let late = soon("a chat during the loss", answer(&model, question("Who are you?", 4))).await;
        let late = late.expect_err("the lost device computes no reply");
        assert!(matches!(late, ChatError::DeviceLost { .. } | ChatError::Stopped { .. }), "{late:?}");
        assert!(late.to_string().contains("lost") && !late.hint().is_empty(), "{late}; {}", late.hint());
        let reason = open.assert_all_lost().await;
        eventually("all credits are free", async || model.requests().0 == 0).await;
        assert_ended(&stage, &model).await;

        // Only the tenant's lease remains, until the tenant drops it. The ledger, the events, the
        // device and another process must all agree on that.
        let events = soon("the end of events", diary).await.expect("the task does not panic");
        let snapshot = stage.runtime.budget().snapshot();
        soon("a question to the budget", snapshot).await.expect_err("the budget has ended too");
        assert_eq!(stage.runtime.budget().leased_bytes(), page);
        assert_eq!(still_leased(&events), page, "{events:?}");
        assert_loss_reported_once(&events, &reason);
        let held = || (stage.device.counts().backed, stage.device.counts().pinned);
        eventually("all memory except the tenant's is returned", async || held() == (page, beside.pinned)).await;
        eventually("another process sees the model's memory as free", async || {
            other_process.sees() + ROUNDING >= free + of_the_model
        })
        .await;
        println!(
            "{free} were free while the model held {of_the_model}, and {} are free after its end",
            other_process.sees()
        );
        drop(tenant);
        eventually("all memory is returned", async || held() == (Bytes::ZERO, Bytes::ZERO)).await;
    });
}
