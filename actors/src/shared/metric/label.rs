//! Labels of metrics. Each label is a type, so that a metric cannot be recorded with wrong labels.
//! The number of values is bounded.

use std::sync::Arc;

use bursar_budgets::{Class, Device, Label, Refusal};
use metrics::SharedString;
use serde::{Serialize, Serializer};

use crate::{deadline::Deadline, finish_reason::FinishReason, phase::Phase, tenant::Tenant, tree::Role};

/// Returns all values of a label that are known in advance. Empty if the values are known only at
/// run time.
pub type Words = fn() -> Vec<&'static str>;

pub trait LabelValue {
    const NAME: &'static str;
    /// All values. Empty if the values are known only at run time.
    const WORDS: Words = Vec::new;
    /// The value of the label. This call must be cheap.
    fn value(&self) -> SharedString;
}

/// The labels of one metric, in order.
pub trait LabelSet {
    const NAMES: &'static [&'static str];
    const WORDS: &'static [Words];
    /// The labels' names with their values.
    fn labels(&self) -> Vec<metrics::Label>;
}

fn label<V: LabelValue>(value: &V) -> metrics::Label {
    metrics::Label::new(V::NAME, value.value())
}

impl LabelSet for () {
    const NAMES: &'static [&'static str] = &[];
    const WORDS: &'static [Words] = &[];

    fn labels(&self) -> Vec<metrics::Label> {
        Vec::new()
    }
}

impl<A: LabelValue> LabelSet for A {
    const NAMES: &'static [&'static str] = &[A::NAME];
    const WORDS: &'static [Words] = &[A::WORDS];

    fn labels(&self) -> Vec<metrics::Label> {
        vec![label(self)]
    }
}

impl<A: LabelValue, B: LabelValue> LabelSet for (A, B) {
    const NAMES: &'static [&'static str] = &[A::NAME, B::NAME];
    const WORDS: &'static [Words] = &[A::WORDS, B::WORDS];

    fn labels(&self) -> Vec<metrics::Label> {
        vec![label(&self.0), label(&self.1)]
    }
}

impl<A: LabelValue, B: LabelValue, C: LabelValue> LabelSet for (A, B, C) {
    const NAMES: &'static [&'static str] = &[A::NAME, B::NAME, C::NAME];
    const WORDS: &'static [Words] = &[A::WORDS, B::WORDS, C::WORDS];

    fn labels(&self) -> Vec<metrics::Label> {
        vec![label(&self.0), label(&self.1), label(&self.2)]
    }
}

impl<A: LabelValue, B: LabelValue, C: LabelValue, D: LabelValue, E: LabelValue> LabelSet for (A, B, C, D, E) {
    const NAMES: &'static [&'static str] = &[A::NAME, B::NAME, C::NAME, D::NAME, E::NAME];
    const WORDS: &'static [Words] = &[A::WORDS, B::WORDS, C::WORDS, D::WORDS, E::WORDS];

    fn labels(&self) -> Vec<metrics::Label> {
        vec![label(&self.0), label(&self.1), label(&self.2), label(&self.3), label(&self.4)]
    }
}

/// A device, by its name on the command line: `host`, `cuda:0`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceLabel(Arc<str>);

impl DeviceLabel {
    pub fn of(device: &dyn Device) -> Self {
        DeviceLabel(device.label().into())
    }

    /// The label of one GPU of a group, by the name that the device gives it.
    pub fn named(card: String) -> Self {
        DeviceLabel(card.into())
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Serialize for DeviceLabel {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

/// The device that a GPU belongs to: its group, or the GPU itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupLabel(pub DeviceLabel);

impl LabelValue for GroupLabel {
    const NAME: &'static str = "group";

    fn value(&self) -> SharedString {
        self.0.value()
    }
}

impl LabelValue for DeviceLabel {
    const NAME: &'static str = "device";

    fn value(&self) -> SharedString {
        self.0.clone().into()
    }
}

/// A model, by the name that the runtime gave it.
impl LabelValue for Label {
    const NAME: &'static str = "model";

    fn value(&self) -> SharedString {
        Arc::<str>::from(self).into()
    }
}

/// The class of a lease. All external leases share one value, because users choose their names.
impl LabelValue for Class {
    const NAME: &'static str = "class";
    const WORDS: Words = || Class::KINDS.to_vec();

    fn value(&self) -> SharedString {
        self.kind().into()
    }
}

impl LabelValue for Phase {
    const NAME: &'static str = "phase";
    const WORDS: Words = || Phase::ALL.iter().map(|phase| phase.name()).collect();

    fn value(&self) -> SharedString {
        self.name().into()
    }
}

/// A tenant that the model's options name, or `other`. A tenant that is named only in requests is
/// never a label value.
impl LabelValue for Tenant {
    const NAME: &'static str = "tenant";
    /// The series of `other` exists from the start. The series of named tenants are created
    /// with their model's scheduler.
    const WORDS: Words = || vec![Tenant::OTHER];

    fn value(&self) -> SharedString {
        self.as_str().to_owned().into()
    }
}

/// The deadline that a request missed.
impl LabelValue for Deadline {
    const NAME: &'static str = "reason";
    const WORDS: Words = || Deadline::ALL.iter().map(|deadline| deadline.name()).collect();

    fn value(&self) -> SharedString {
        self.name().into()
    }
}

/// A route of the server, as listed in `/openapi.json`, or `other`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route(pub Arc<str>);

impl LabelValue for Route {
    const NAME: &'static str = "route";

    fn value(&self) -> SharedString {
        self.0.clone().into()
    }
}

/// The HTTP status of a response, or 0 if the client disconnected first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HttpStatus(pub u16);

impl LabelValue for HttpStatus {
    const NAME: &'static str = "status";

    fn value(&self) -> SharedString {
        self.0.to_string().into()
    }
}

/// The index of a drafted token among its sequence's drafts in a step. Series of the first eight
/// positions start at 0. A larger limit `draft_tokens` adds more series.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftPosition(pub usize);

impl LabelValue for DraftPosition {
    const NAME: &'static str = "position";
    const WORDS: Words = || vec!["0", "1", "2", "3", "4", "5", "6", "7"];

    fn value(&self) -> SharedString {
        self.0.to_string().into()
    }
}

/// The index of a cache group: attention layers that share block tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheGroupIndex(pub usize);

impl LabelValue for CacheGroupIndex {
    const NAME: &'static str = "cache_group";

    fn value(&self) -> SharedString {
        self.0.to_string().into()
    }
}

macro_rules! given {
    ($($(#[$doc:meta])* $name:ident = $label:literal;)*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug, PartialEq, Eq)]
            pub struct $name(pub &'static str);

            impl LabelValue for $name {
                const NAME: &'static str = $label;

                fn value(&self) -> SharedString {
                    self.0.into()
                }
            }
        )*
    };
}

given! {
    /// The version of this crate.
    Version = "version";
    /// The build: `debug` or `release`.
    Build = "build";
    /// The architecture of a checkpoint, by its name in the registry and in `config.json`.
    Architecture = "architecture";
    /// The element type that a model computes in.
    Dtype = "dtype";
    /// The format to which a model's weights are quantized, by Bursar or in the checkpoint.
    /// `none` if the weights are not quantized.
    Quantization = "quantization";
    /// The element type of the KV cache.
    KvCacheDtype = "kv_cache_dtype";
    /// The `code` of an error of the server, or its `type` if it has no code.
    HttpError = "code";
}

macro_rules! words {
    ($label:literal: $(#[$doc:meta])* $name:ident { $($(#[$word_doc:meta])* $variant:ident = $word:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum $name {
            $($(#[$word_doc])* $variant,)*
        }

        impl $name {
            pub const ALL: [$name; [$($word),*].len()] = [$($name::$variant),*];

            pub const fn name(self) -> &'static str {
                match self {
                    $($name::$variant => $word,)*
                }
            }
        }

        impl LabelValue for $name {
            const NAME: &'static str = $label;
            const WORDS: Words = || vec![$($word),*];

            fn value(&self) -> SharedString {
                self.name().into()
            }
        }
    };
}

/// The roles of a model's actors. The runtime and the budget belong to no
/// model and report separately.
impl LabelValue for Role {
    const NAME: &'static str = "actor";
    const WORDS: Words = || Role::OF_A_MODEL.iter().map(|role| role.name()).collect();

    fn value(&self) -> SharedString {
        self.name().into()
    }
}

/// Why a lease was refused, without numbers such as the missing bytes.
impl LabelValue for Refusal {
    const NAME: &'static str = "reason";
    const WORDS: Words = || Refusal::NAMES.to_vec();

    fn value(&self) -> SharedString {
        self.name().into()
    }
}

words! { "permit":
    /// A resource for which a profile sets permits.
    Permit {
        Sequences = "sequences",
        /// Patches in a batch of the vision encoder.
        Patches = "patches",
    }
}

words! { "reason":
    /// The outcome of an attempt at sizing.
    AttemptEnd {
        /// The model serves with the size that was found.
        Ready = "ready",
        /// The device or the ledger had too little memory.
        Memory = "memory",
        Error = "error",
        Died = "died",
    }
}

words! {
    "direction":
    /// The direction in which blocks are copied.
    Direction {
        /// From the device to host memory.
        ToHost = "to_host",
        /// From host memory to the device.
        ToDevice = "to_device",
    }
}

words! { "reason":
    /// Why a sequence lost its blocks before it ended.
    Preempted {
        /// Older or more urgent running sequences needed the blocks.
        Blocks = "blocks",
        /// A more urgent waiting sequence needed the blocks or the slot in the batch.
        Priority = "priority",
        Shrink = "shrink",
    }
}

words! { "reason":
    /// Why the interval before a token exceeded the target.
    Late {
        /// Prompts took too much of a step.
        Prompt = "prompt",
        /// Pictures were encoded on the same GPU.
        Picture = "picture",
        /// The sequence had lost its blocks, or its actors had died.
        Preemption = "preemption",
        /// The KV cache was resized.
        Resize = "resize",
        /// Decoding itself took this long, or the cause is outside the engine.
        Other = "other",
    }
}

words! { "reason":
    /// Why a model was put to sleep.
    SleepReason {
        Call = "call",
        /// The model had no request for `sleep_after`.
        Idle = "idle",
        /// Another model needed the memory.
        FreeMemory = "room",
    }
}

words! { "reason":
    /// Why a model woke up.
    WakeReason {
        Call = "call",
        Request = "request",
    }
}

words! { "reason":
    RequestEnd {
        /// An end token, a stop token, a stop string or a complete tool call ended the reply.
        Stop = "stop",
        /// The reply reached its maximum number of tokens.
        Length = "length",
        /// The caller disconnected before the end.
        Cancelled = "cancelled",
        /// The chat was malformed or outside the envelope.
        Refused = "refused",
        /// The limit of requests that run or wait had been reached.
        Overloaded = "overloaded",
        /// The model was asleep, and did not wake up in time or could not wake up.
        Asleep = "asleep",
        /// A deadline of the request passed.
        TooLate = "too_late",
        /// The model did not start, has stopped, or is shutting down.
        Stopped = "stopped",
        DeviceLost = "device_lost",
        /// Actors died too often during the request.
        GivenUp = "given_up",
        Error = "error",
    }
}

impl From<FinishReason> for RequestEnd {
    fn from(reason: FinishReason) -> Self {
        match reason {
            FinishReason::Stop | FinishReason::ToolCalls => RequestEnd::Stop,
            FinishReason::Length => RequestEnd::Length,
        }
    }
}
