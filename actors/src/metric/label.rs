//! Labels. Each is a type, so that a metric cannot be recorded with the wrong ones. Their values are bounded.

use std::sync::Arc;

use bursar_budgets::{Class, Device, Label, Refusal};
use metrics::SharedString;
use serde::{Serialize, Serializer};

use crate::{deadline::Deadline, finish_reason::FinishReason, phase::Phase, tenant::Tenant, tree::Role};

/// All values of a label, known in advance. Empty for names of devices and models.
pub type Words = fn() -> Vec<&'static str>;

/// A value of one label.
pub trait LabelValue {
    /// The label's name.
    const NAME: &'static str;
    /// All values. Empty if they are known only at run time.
    const WORDS: Words = Vec::new;
    /// The value. Must be cheap.
    fn value(&self) -> SharedString;
}

/// The labels of one metric, in order.
pub trait LabelSet {
    /// The names of the labels.
    const NAMES: &'static [&'static str];
    /// All values of each label.
    const WORDS: &'static [Words];
    /// The names with their values.
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

/// A device by the name used on the command line: `host`, `cuda:0`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceLabel(Arc<str>);

impl DeviceLabel {
    /// The label of `device`.
    pub fn of(device: &dyn Device) -> Self {
        DeviceLabel(device.label().into())
    }

    /// The label of a card of a device, by the name that the device gives it.
    pub fn named(card: String) -> Self {
        DeviceLabel(card.into())
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// As its name.
impl Serialize for DeviceLabel {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

/// The device that a card belongs to: the card itself, or its group.
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

/// The class of a lease. All tenants share one value, because they choose their own names.
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

/// A tenant that the model's options name, or `other`: never one that only requests name.
impl LabelValue for Tenant {
    const NAME: &'static str = "tenant";
    /// The others' series is there from the start; those with weights come with their model's scheduler.
    const WORDS: Words = || vec![Tenant::OTHER];

    fn value(&self) -> SharedString {
        self.as_str().to_owned().into()
    }
}

/// What a request did not reach in time.
impl LabelValue for Deadline {
    const NAME: &'static str = "reason";
    const WORDS: Words = || Deadline::ALL.iter().map(|deadline| deadline.name()).collect();

    fn value(&self) -> SharedString {
        self.name().into()
    }
}

/// A route of the server, as `/openapi.json` has it, or `other`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route(pub Arc<str>);

impl LabelValue for Route {
    const NAME: &'static str = "route";

    fn value(&self) -> SharedString {
        self.0.clone().into()
    }
}

/// The status of an answer; 0 if the client left before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HttpStatus(pub u16);

impl LabelValue for HttpStatus {
    const NAME: &'static str = "status";

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
    /// The family of a checkpoint, by the registry's name, as in `config.json`.
    Architecture = "architecture";
    /// The element type that a model computes in.
    Dtype = "dtype";
    /// What rounds a model's weights to FP8, or has rounded its checkpoint: `none` if they are plain.
    Quantization = "quantization";
    /// The element type of keys and values.
    KvCacheDtype = "kv_cache_dtype";
    /// The `code` of an error of the server, or else its `type`.
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
            /// All values.
            pub const ALL: [$name; [$($word),*].len()] = [$($name::$variant),*];

            /// The label's value.
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

/// The roles of a model. Runtime and budget belong to no model and report separately.
impl LabelValue for Role {
    const NAME: &'static str = "actor";
    const WORDS: Words = || Role::OF_A_MODEL.iter().map(|role| role.name()).collect();

    fn value(&self) -> SharedString {
        self.name().into()
    }
}

/// Why a lease was refused, without the numbers.
impl LabelValue for Refusal {
    const NAME: &'static str = "reason";
    const WORDS: Words = || Refusal::NAMES.to_vec();

    fn value(&self) -> SharedString {
        self.name().into()
    }
}

words! { "permit":
    /// What a profile permits a limited number of.
    Permit {
        /// Sequences in a step.
        Sequences = "sequences",
        /// Patches in a launch of pictures.
        Patches = "patches",
    }
}

words! { "reason":
    /// How an attempt at sizing ended.
    AttemptEnd {
        /// The model serves with the size found.
        Ready = "ready",
        /// The device or the ledger had too little memory.
        Memory = "memory",
        /// Something else failed.
        Error = "error",
        /// Its actor died.
        Died = "died",
    }
}

words! {
    "direction":
    /// Which way blocks are copied.
    Direction {
        /// From the device to host memory.
        ToHost = "to_host",
        /// From host memory to the device.
        ToDevice = "to_device",
    }
}

words! { "reason":
    /// Why a sequence lost its blocks before its end.
    Preempted {
        /// Older or more urgent sequences that ran needed the blocks.
        Blocks = "blocks",
        /// A more urgent sequence that waited needed its place or blocks.
        Priority = "priority",
        /// Keys and values shrank.
        Shrink = "shrink",
    }
}

words! { "reason":
    /// Why a token came later than the promised interval after the one before it.
    Late {
        /// Prompts took too much of a step.
        Prompt = "prompt",
        /// Pictures were encoded on the same card.
        Picture = "picture",
        /// Its sequence had lost its blocks, or its actors had died.
        Preemption = "preemption",
        /// Keys and values changed their size.
        Resize = "resize",
        /// Decoding alone took as long, or something outside the engine.
        Other = "other",
    }
}

words! { "reason":
    /// Why a model fell asleep.
    SleepReason {
        /// Its user asked for it.
        Call = "call",
        /// It had no request for as long as `sleep_after`.
        Idle = "idle",
        /// Another model needed its memory.
        Room = "room",
    }
}

words! { "reason":
    /// Why a model woke up.
    WakeReason {
        /// Its user asked for it.
        Call = "call",
        /// A request came.
        Request = "request",
    }
}

words! { "reason":
    /// How a request ended.
    RequestEnd {
        /// The model ended the reply, or it contained a stop string.
        Stop = "stop",
        /// The reply reached its limit of tokens.
        Length = "length",
        /// Its caller left.
        Cancelled = "cancelled",
        /// The chat was malformed or outside the envelope.
        Refused = "refused",
        /// As many requests as allowed were running or waiting.
        Overloaded = "overloaded",
        /// The model slept, and was not awake in time.
        Asleep = "asleep",
        /// Its deadline passed.
        TooLate = "too_late",
        /// The model did not start, has stopped, or is shutting down.
        Stopped = "stopped",
        /// The device was lost.
        DeviceLost = "device_lost",
        /// Too many actors died under it.
        GivenUp = "given_up",
        /// Anything else.
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
