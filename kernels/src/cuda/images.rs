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
        const SM_75: &[Image] = &[$(ptx!($name, ".sm_75.ptx"),)* ptx!("linear_e4m3", ".sm_75.ptx")];

        /// For Ampere: PTX, which the driver compiles.
        const SM_80: &[Image] = &[$(ptx!($name, ".sm_80.ptx"),)* ptx!("linear_e4m3", ".sm_80.ptx")];

        /// For everything from Ada on that has no machine code of its own: Ampere's, with products on tensor cores that
        /// multiply E4M3.
        const SM_89: &[Image] = &[$(ptx!($name, ".sm_80.ptx"),)* ptx!("linear_e4m3", ".sm_89.ptx")];

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
            machine_code!("quantize_many"),
            machine_code!("route_normed"),
            machine_code!("turn_scales"),
        ];
    };
}

macro_rules! ptx {
    ($name:literal, $ending:literal) => {
        Image {
            name: $name,
            code: concat!(include_str!(concat!("../../cuda/compiled/", $name, $ending)), "\0").as_bytes(),
        }
    };
}

macro_rules! machine_code {
    ($name:literal) => {
        Image { name: $name, code: include_bytes!(concat!("../../cuda/compiled/", $name, ".sm_90a.cubin")) }
    };
}

images! {
    "add_rows" "argmax" "attention_decode" "attention_prefill" "embed" "experts" "fill_random" "gather_rows" "gelu" "layer_norm"
    "patchify" "position_grid" "quantize" "rms_norm" "route" "rotary" "sampling" "scatter_rows" "silu_mul"
}

/// The images for a GPU of this capability, best first. An older driver may refuse machine code from a newer compiler
/// and still compile PTX.
pub(super) fn images_for(capability: (u32, u32)) -> Vec<Images> {
    let ptx = |modules| Images { modules, is_machine_code: false };
    match capability {
        (7, 5) => vec![ptx(SM_75)],
        (9, 0) => vec![Images { modules: SM_90A, is_machine_code: true }, ptx(SM_89)],
        capability if capability >= (8, 9) => vec![ptx(SM_89)],
        capability if capability >= (8, 0) => vec![ptx(SM_80)],
        _ => Vec::new(),
    }
}
