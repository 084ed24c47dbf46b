//! Memory by `__cuda_array_interface__` and `__array_interface__`.

use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::copies;
use crate::dlpack::is_contiguous;
use crate::element::name_of_kind;
use crate::memory::{Memory, Owner, Range, not_contiguous, pointers};

/// The memory of an object that has such an attribute; `None` if it has none.
pub(crate) fn hold<'py>(
    object: &Bound<'py, PyAny>,
    argument: &str,
) -> PyResult<Option<Memory<'py>>> {
    let py = object.py();
    for name in ["__cuda_array_interface__", "__array_interface__"] {
        if object.hasattr(name)? {
            let interface = object.getattr(name)?.cast_into::<PyDict>()?;
            let is_device = name == "__cuda_array_interface__";
            let (range, element) = read(&interface, is_device, argument)?;
            if let Some(device) = range.device
                && let Some(stream) = interface.get_item("stream")?.filter(|it| !it.is_none())
            {
                copies::wait_for_stream(py, device, stream.extract()?)?;
            }
            // The interface may own the memory that it names.
            let object = (object, interface).into_pyobject(py)?.into_any().unbind();
            return Ok(Some(Memory::new(py, range, Owner::Object { object, element })));
        }
    }
    Ok(None)
}

/// How deep the fields of a structured type may lie in one another.
const MAX_DEPTH: u32 = 32;

/// Whether a field of a structured type is an object: `fields` has tuples of a name, a type and maybe a shape, and a
/// type is a text or such a list itself.
fn has_objects(fields: &Bound<'_, PyAny>, depth: u32) -> PyResult<bool> {
    if let Ok(text) = fields.extract::<String>() {
        return Ok(text.as_bytes().get(1) == Some(&b'O'));
    }
    if depth == 0 || fields.is_none() {
        return Ok(depth == 0);
    }
    for field in fields.try_iter()? {
        if has_objects(&field?.get_item(1)?, depth - 1)? {
            return Ok(true);
        }
    }
    Ok(false)
}

fn read(
    interface: &Bound<'_, PyDict>,
    is_device: bool,
    argument: &str,
) -> PyResult<(Range, String)> {
    let wanted = |name: &str| {
        let missing = || PyBufferError::new_err(format!("the array interface has no {name}"));
        interface.get_item(name)?.filter(|it| !it.is_none()).ok_or_else(missing)
    };
    let (address, is_read_only): (usize, bool) = wanted("data")?.extract()?;
    let shape: Vec<i64> = wanted("shape")?.extract()?;
    let type_text: String = wanted("typestr")?.extract()?;
    if let Some(fields) = interface.get_item("descr")?
        && has_objects(&fields, MAX_DEPTH)?
    {
        return Err(pointers(argument, &fields.to_string()));
    }
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
    let is_foreign = type_text.starts_with('>') && item > 1;
    let name = name_of_kind(type_text.as_bytes()[1], usize::try_from(item).unwrap_or(0));
    let element = name.filter(|_| !is_foreign).unwrap_or(type_text);
    Ok((Range { address, length, device, is_read_only }, element))
}
