//! Memory of tensors by DLPack: PyTorch, CuPy, JAX and others.
//!
//! The capsule is kept and not consumed: its own destructor frees what the exporter has allocated.
//! The layouts are those of DLPack's header, version 0.8 (`dltensor`) and 1.0
//! (`dltensor_versioned`).

use std::ffi::{CStr, c_void};

use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyCapsule};

use crate::copies;
use crate::element::name_of_kind;
use crate::memory::{Memory, Owner, Range, not_contiguous};

const CPU: i32 = 1;
const CUDA: i32 = 2;
const CUDA_HOST: i32 = 3;
const READ_ONLY: u64 = 1;

/// The legacy default stream, as DLPack and the driver number it.
pub(crate) const LEGACY_STREAM: u64 = 1;

#[repr(C)]
struct DlDevice {
    kind: i32,
    number: i32,
}

#[repr(C)]
struct DlDataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

impl DlDataType {
    fn name(&self) -> String {
        let Self { code, bits, lanes } = *self;
        let kind = [b'i', b'u', b'f', 0, 0, b'c', b'b'].get(usize::from(code));
        let name = kind.and_then(|kind| name_of_kind(*kind, usize::from(bits / 8)));
        name.filter(|_| lanes == 1 && bits.is_multiple_of(8))
            .unwrap_or_else(|| format!("DLPack's type {code} of {bits} bits x {lanes}"))
    }
}

#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device: DlDevice,
    dimensions: i32,
    data_type: DlDataType,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

#[repr(C)]
struct VersionedTensor {
    major: u32,
    minor: u32,
    manager: *mut c_void,
    deleter: *mut c_void,
    flags: u64,
    tensor: DlTensor,
}

const LEGACY_NAME: &CStr = c"dltensor";
const VERSIONED_NAME: &CStr = c"dltensor_versioned";

/// The memory of an object that speaks DLPack; `None` if it does not.
pub(crate) fn hold<'py>(object: &Bound<'py, PyAny>) -> PyResult<Option<Memory<'py>>> {
    if !object.hasattr("__dlpack__")? || !object.hasattr("__dlpack_device__")? {
        return Ok(None);
    }
    let py = object.py();
    let (kind, number): (i32, i32) = object.call_method0("__dlpack_device__")?.extract()?;
    // A device's memory is ready when the exporter's work so far is: the exporter lets the default
    // stream wait for it, and that stream is waited for below.
    let options = [("max_version", (1, 0).into_pyobject(py)?.into_any())].into_py_dict(py)?;
    if kind == CUDA {
        options.set_item("stream", LEGACY_STREAM)?;
    }
    let capsule = match object.call_method("__dlpack__", (), Some(&options)) {
        Err(error) if error.is_instance_of::<PyTypeError>(py) => {
            options.del_item("max_version")?;
            object.call_method("__dlpack__", (), Some(&options))?
        }
        other => other?,
    };
    let capsule = capsule.cast_into::<PyCapsule>()?;
    let (mut range, element) = read(&capsule)?;
    range.is_read_only |= is_immutable(object)?;
    if let Some(device) = range.device {
        copies::wait_for_stream(py, device, LEGACY_STREAM)?;
    } else if kind == CUDA {
        return Err(PyBufferError::new_err(format!("GPU {number} exported host memory")));
    }
    let object = capsule.into_any().unbind();
    Ok(Some(Memory::new(py, range, Owner::Object { object, element })))
}

/// Whether an object is of a library whose arrays never change: JAX. Its capsules, of version 0.8,
/// cannot say so.
fn is_immutable(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    let module = object.get_type().getattr("__module__")?;
    let module = module.extract::<String>().unwrap_or_default();
    let package = module.split('.').next().unwrap_or_default();
    Ok(package == "jax" || package == "jaxlib")
}

fn read(capsule: &Bound<'_, PyCapsule>) -> PyResult<(Range, String)> {
    let (tensor, flags) = if capsule.is_valid_checked(Some(VERSIONED_NAME)) {
        let pointer = capsule.pointer_checked(Some(VERSIONED_NAME))?;
        // SAFETY: a capsule of this name points to such a structure, which it keeps alive.
        let versioned = unsafe { pointer.cast::<VersionedTensor>().as_ref() };
        if versioned.major != 1 {
            return Err(PyBufferError::new_err(format!(
                "DLPack version {} is not known",
                versioned.major
            )));
        }
        (&versioned.tensor, versioned.flags)
    } else {
        let pointer = capsule.pointer_checked(Some(LEGACY_NAME))?;
        // SAFETY: as above; the structure begins with the tensor.
        (unsafe { pointer.cast::<DlTensor>().as_ref() }, 0)
    };
    let device = match tensor.device.kind {
        CPU | CUDA_HOST => None,
        CUDA => Some(tensor.device.number),
        other => {
            return Err(PyBufferError::new_err(format!(
                "memory of DLPack's device type {other} cannot be copied: only CPU and CUDA"
            )));
        }
    };
    let dimensions = usize::try_from(tensor.dimensions).unwrap_or(0);
    let list = |pointer: *const i64| {
        if dimensions == 0 || pointer.is_null() {
            None
        } else {
            // SAFETY: the format promises one number for each dimension, and the capsule keeps
            // them.
            Some(unsafe { std::slice::from_raw_parts(pointer, dimensions) })
        }
    };
    let shape = list(tensor.shape).unwrap_or(&[]);
    if let Some(strides) = list(tensor.strides)
        && !is_contiguous(shape, strides)
    {
        return Err(not_contiguous());
    }
    let bits = usize::from(tensor.data_type.bits) * usize::from(tensor.data_type.lanes);
    let elements =
        shape.iter().try_fold(1usize, |all, &one| all.checked_mul(usize::try_from(one).ok()?));
    let length = elements
        .and_then(|elements| elements.checked_mul(bits))
        .map(|bits| bits.div_ceil(8))
        .ok_or_else(|| PyBufferError::new_err("the shape of the tensor is not possible"))?;
    let address = (tensor.data as usize)
        .checked_add(tensor.byte_offset as usize)
        .ok_or_else(|| PyBufferError::new_err("the offset of the tensor is not possible"))?;
    let range = Range { address, length, device, is_read_only: flags & READ_ONLY != 0 };
    Ok((range, tensor.data_type.name()))
}

/// Whether strides, counted in elements, are those of row-major order.
pub(crate) fn is_contiguous(shape: &[i64], strides: &[i64]) -> bool {
    if shape.contains(&0) {
        return true;
    }
    let mut expected = 1i64;
    for (&length, &stride) in shape.iter().zip(strides).rev() {
        if length != 1 && stride != expected {
            return false;
        }
        expected = expected.saturating_mul(length);
    }
    true
}
