//! `memferry top --listen`: the OpenMetrics text over HTTP, on the loopback interface, one request at a time.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::Context;

use super::{metrics, read};
use crate::show;

/// The longest request, and the longest time for one.
const MAX_REQUEST_BYTES: usize = 8 << 10;
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// Serves requests until the process is ended.
pub(super) fn serve(address: SocketAddr, pid: Option<u32>) -> anyhow::Result<()> {
    let listener = TcpListener::bind(address)
        .with_context(|| format!("cannot listen on {address}: choose another port"))?;
    show::print(&format!("http://{}/metrics\n", listener.local_addr()?))?;
    for stream in listener.incoming() {
        let Ok(mut stream) = stream else {
            // No descriptor is free, for example. Others may be closed soon.
            std::thread::sleep(Duration::from_millis(100));
            continue;
        };
        // A scraper that goes away is no error of this program.
        let _ = answer(&mut stream, pid);
    }
    Ok(())
}

fn answer(stream: &mut TcpStream, pid: Option<u32>) -> io::Result<()> {
    stream.set_write_timeout(Some(REQUEST_TIMEOUT))?;
    let request = read_request(stream)?;
    let (status, kind, body) = match check(&request) {
        Ok(()) => match read(pid) {
            Ok(sample) => ("200 OK", metrics::CONTENT_TYPE, metrics::render(&sample.processes)),
            Err(error) => ("500 Internal Server Error", "text/plain", format!("{error:#}\n")),
        },
        Err(status) => (status, "text/plain", format!("{status}\n")),
    };
    let length = body.len();
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    )?;
    stream.flush()
}

/// The head of a request.
fn read_request(stream: &mut TcpStream) -> io::Result<String> {
    let deadline = Instant::now() + REQUEST_TIMEOUT;
    let mut request = Vec::new();
    let mut part = [0; 1024];
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() || request.len() > MAX_REQUEST_BYTES {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut part)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            length => request.extend_from_slice(&part[..length]),
        }
    }
    Ok(String::from_utf8_lossy(&request).into_owned())
}

/// Whether a request is answered. Its host must be this one: a page in a browser could use a name that leads here.
fn check(request: &str) -> Result<(), &'static str> {
    let mut lines = request.lines();
    let mut words = lines.next().unwrap_or_default().split(' ');
    let (method, path) = (words.next(), words.next().unwrap_or_default());
    let host = lines.find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("host").then(|| value.trim())
    });
    if !host.is_none_or(is_loopback) {
        return Err("403 Forbidden");
    }
    match (method, path.split('?').next()) {
        (Some("GET"), Some("/metrics" | "/")) => Ok(()),
        (Some("GET"), _) => Err("404 Not Found"),
        _ => Err("405 Method Not Allowed"),
    }
}

fn is_loopback(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    name == "localhost" || name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_requests_for_the_metrics_of_this_host_are_answered() {
        let get =
            |path: &str, host: &str| check(&format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n"));
        assert_eq!(get("/metrics", "127.0.0.1:9464"), Ok(()));
        assert_eq!(get("/metrics?x=1", "[::1]:9464"), Ok(()));
        assert_eq!(get("/", "localhost"), Ok(()));
        assert_eq!(get("/etc/passwd", "localhost"), Err("404 Not Found"));
        assert_eq!(get("/metrics", "rebound.example:9464"), Err("403 Forbidden"));
        assert_eq!(check("POST /metrics HTTP/1.1\r\n\r\n"), Err("405 Method Not Allowed"));
        assert_eq!(check(""), Err("405 Method Not Allowed"));
    }
}
