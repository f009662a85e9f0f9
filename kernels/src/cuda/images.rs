//! The compiled device code: built by `kernels/cuda/compile.py` from `kernels/cuda/`, committed, and embedded here.

/// One module of device code.
pub(super) struct Image {
    pub name: &'static str,
    /// A cubin, or PTX terminated by a zero byte.
    pub code: &'static [u8],
}

/// All modules for one GPU generation.
pub(super) struct Images {
    pub modules: &'static [Image],
    /// True for cubins, false for PTX.
    pub is_machine_code: bool,
}

macro_rules! images {
    ($($name:literal)*) => {
        /// For Turing: PTX of f16 kernels, which the driver compiles.
        const SM_75: &[Image] = &[$(Image {
            name: $name,
            code: concat!(include_str!(concat!("../../cuda/compiled/", $name, ".sm_75.ptx")), "\0").as_bytes(),
        },)*];

        /// For everything from Ampere on that has no machine code of its own: PTX, which the driver compiles.
        const SM_80: &[Image] = &[$(Image {
            name: $name,
            code: concat!(include_str!(concat!("../../cuda/compiled/", $name, ".sm_80.ptx")), "\0").as_bytes(),
        },)*];

        /// For Hopper: machine code, including the kernels that only Hopper has.
        const SM_90A: &[Image] = &[
            $(machine_code!($name),)*
            machine_code!("all_reduce"),
            machine_code!("attention_decode_e4m3"),
            machine_code!("attention_prefill_hopper"),
            machine_code!("attention_paged_combine"),
            machine_code!("experts_few"),
            machine_code!("experts_few_e4m3"),
            machine_code!("experts_many"),
            machine_code!("experts_many_e4m3"),
            machine_code!("linear_few"),
            machine_code!("linear_few_e4m3"),
            machine_code!("linear_gated_hopper"),
            machine_code!("linear_many_e4m3"),
            machine_code!("gate_up_middle"),
            machine_code!("quantize"),
            machine_code!("route_normed"),
        ];
    };
}

macro_rules! machine_code {
    ($name:literal) => {
        Image { name: $name, code: include_bytes!(concat!("../../cuda/compiled/", $name, ".sm_90a.cubin")) }
    };
}

images! {
    "add_rows" "argmax" "attention_decode" "attention_prefill" "embed" "experts" "fill_random" "gather_rows" "gelu" "layer_norm"
    "patchify" "position_grid" "rms_norm" "route" "rotary" "sampling" "scatter_rows" "silu_mul"
}

/// The images for a GPU of this capability, best first. An older driver may refuse machine code from a newer compiler
/// and still compile PTX.
pub(super) fn images_for(capability: (u32, u32)) -> Vec<Images> {
    let ptx = |modules| Images { modules, is_machine_code: false };
    match capability {
        (7, 5) => vec![ptx(SM_75)],
        (9, 0) => vec![Images { modules: SM_90A, is_machine_code: true }, ptx(SM_80)],
        capability if capability >= (8, 0) => vec![ptx(SM_80)],
        _ => Vec::new(),
    }
}
