//! Memory by `__cuda_array_interface__` and `__array_interface__`.

use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::copies;
use crate::dlpack::is_contiguous;
use crate::memory::{Held, Owner, Range, not_contiguous};

/// The memory of an object that has such an attribute; `None` if it has none.
pub(crate) fn hold(object: &Bound<'_, PyAny>) -> PyResult<Option<Held>> {
    for name in ["__cuda_array_interface__", "__array_interface__"] {
        if object.hasattr(name)? {
            let interface = object.getattr(name)?.cast_into::<PyDict>()?;
            let is_device = name == "__cuda_array_interface__";
            let range = read(&interface, is_device)?;
            if let Some(device) = range.device
                && let Some(stream) = interface.get_item("stream")?.filter(|it| !it.is_none())
            {
                copies::wait_for_stream(object.py(), device, stream.extract()?)?;
            }
            // The interface may own the memory that it names.
            let owner = (object, interface).into_pyobject(object.py())?.into_any().unbind();
            return Ok(Some(Held::new(range, Owner::Object(owner))));
        }
    }
    Ok(None)
}

fn read(interface: &Bound<'_, PyDict>, is_device: bool) -> PyResult<Range> {
    let wanted = |name: &str| {
        let missing = || PyBufferError::new_err(format!("the array interface has no {name}"));
        interface.get_item(name)?.filter(|it| !it.is_none()).ok_or_else(missing)
    };
    let (address, is_read_only): (usize, bool) = wanted("data")?.extract()?;
    let shape: Vec<i64> = wanted("shape")?.extract()?;
    let type_text: String = wanted("typestr")?.extract()?;
    // Texts and bit fields count something else than bytes; objects are references.
    let is_counted_in_bytes = |_: &&str| !matches!(type_text.as_bytes()[1], b'U' | b't' | b'O');
    let digits = type_text.get(2..).filter(is_counted_in_bytes);
    let item: i64 = digits
        .and_then(|digits| digits.parse().ok())
        .filter(|&item| item > 0)
        .ok_or_else(|| PyBufferError::new_err(format!("arrays of {type_text} are not copied")))?;
    if let Some(strides) = interface.get_item("strides")?.filter(|it| !it.is_none()) {
        let strides: Vec<i64> = strides.extract()?;
        let is_whole = strides.iter().zip(&shape).all(|(s, &n)| n == 1 || s % item == 0);
        let in_items: Vec<i64> = strides.iter().map(|stride| stride / item).collect();
        if strides.len() != shape.len() || !is_whole || !is_contiguous(&shape, &in_items) {
            return Err(not_contiguous());
        }
    }
    let length = shape
        .iter()
        .try_fold(item, |all, &one| if one < 0 { None } else { all.checked_mul(one) })
        .and_then(|length| usize::try_from(length).ok())
        .ok_or_else(|| PyBufferError::new_err("the shape of the array is not possible"))?;
    let device = if is_device { Some(copies::device_of_address(address)?) } else { None };
    Ok(Range { address, length, device, is_read_only })
}
