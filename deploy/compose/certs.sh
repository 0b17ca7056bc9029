#!/bin/sh
# Makes what the kvds of several nodes show each other: a CA, and for each node a certificate and key for its address.
# Run once, on one machine: certs.sh FOLDER ADDRESS...   (addresses or names, as PDSERVE_NODE_ADDRESS has them)
# Then each node gets FOLDER/ADDRESS.pem, FOLDER/ADDRESS.key and FOLDER/ca.pem as secrets/peer.pem, peer.key and peer-ca.pem,
# readable for PDSERVE_UID alone. FOLDER/ca.key signs further nodes: keep it off all of them.
set -eu
folder=${1:?usage: certs.sh FOLDER ADDRESS...}
shift
[ $# -gt 0 ] || { echo "certs.sh: for which addresses?" >&2; exit 2; }
days=${DAYS:-825}
umask 077
mkdir -p "$folder"
cd "$folder"
if [ ! -e ca.key ]; then
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days "$days" -subj "/CN=pdserve peers" \
    -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign -keyout ca.key -out ca.pem 2>/dev/null
fi
for address; do
  case $address in
    *[!0-9.]*) name=DNS:$address ;;
    *) name=IP:$address ;;
  esac
  case $address in *:*) name=IP:$address ;; esac
  openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj "/CN=$address" \
    -keyout "$address.key" -out "$address.csr" 2>/dev/null
  # Both sides show it: each calls, and each is called.
  printf 'subjectAltName=%s\nextendedKeyUsage=serverAuth,clientAuth\n' "$name" >"$address.ext"
  openssl x509 -req -in "$address.csr" -CA ca.pem -CAkey ca.key -CAcreateserial -days "$days" \
    -extfile "$address.ext" -out "$address.pem" 2>/dev/null
  rm "$address.csr" "$address.ext"
done
